-- How many blocks of a chain each pod holds, from its start. Sets are prefix-closed (eviction is leaf-first), so the
-- longest match is found by galloping and then halving: O(log match) membership tests per pod.
-- KEYS: pods   ARGV: key prefix, chain (packed, 8 bytes each), then pod, generation, ...
-- Returns one count per pod; 0 for a pod whose lease is not of that generation.
local prefix, chain = ARGV[1], ARGV[2]
local length = #chain / 8
local matched = {}
for i = 3, #ARGV, 2 do
  local pod, generation = ARGV[i], ARGV[i + 1]
  local low, high = 0, 1
  if redis.call('GET', prefix .. 'lease:' .. pod) == generation then
    local own = prefix .. 'own:' .. pod .. ':' .. generation
    local function holds(n)
      return redis.call('SISMEMBER', own, string.sub(chain, 8 * n - 7, 8 * n)) == 1
    end
    while high <= length and holds(high) do
      low, high = high, 2 * high
    end
    high = math.min(high, length + 1)
    while high - low > 1 do
      local middle = math.floor((low + high) / 2)
      if holds(middle) then low = middle else high = middle end
    end
  end
  matched[#matched + 1] = low
end
return matched
