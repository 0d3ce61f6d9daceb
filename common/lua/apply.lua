-- Applies one numbered batch of changes to a pod's set.
-- KEYS: lease, own, seq   ARGV: generation, batch number, TTL in s, stored, evicted (packed, 8 bytes each)
-- Returns 'ok', 'duplicate' (nothing done), 'gap' (send a snapshot) or 'fenced' (register again).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'fenced'
end
local last, number = tonumber(redis.call('GET', KEYS[3]) or -1), tonumber(ARGV[2])
if last < 0 or number > last + 1 then
  return 'gap'
end
if number <= last then
  return 'duplicate'
end
local function each(command, packed)
  for first = 1, #packed, 8000 do
    local members = {}
    for at = first, math.min(first + 7999, #packed), 8 do
      members[#members + 1] = string.sub(packed, at, at + 7)
    end
    redis.call(command, KEYS[2], unpack(members))
  end
end
each('SREM', ARGV[5])
each('SADD', ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('SET', KEYS[3], ARGV[2], 'EX', ARGV[3])
return 'ok'
