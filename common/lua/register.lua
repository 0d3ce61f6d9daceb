-- Enters a pod under its generation and gives it a slot, the number that postings know it by. An older generation than
-- the registered one is refused; what the generation before left behind is freed, and so are pods whose info expired
-- long ago.
-- KEYS: pods, info, lease, load, resv, resv_tokens, slots, sweep
-- ARGV: key prefix, pod, generation, lease in ms, info TTL in s, pods TTL in s, load, then info as field, value, ...
-- Returns the slot, 1 to 65535, or 0 when refused.
local prefix, pod, generation = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('HGET', KEYS[1], pod)
if known and tonumber(known) > tonumber(generation) then
  return 0
end
if known and known ~= generation then
  local former = pod .. ':' .. known
  redis.call('UNLINK', prefix .. 'own:' .. former, prefix .. 'host:' .. former, prefix .. 'seq:' .. former)
  redis.call('UNLINK', KEYS[5], KEYS[6])
end
for _, other in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('EXISTS', prefix .. 'info:' .. other) == 0 then
    redis.call('HDEL', KEYS[1], other)
  end
end
redis.call('HSET', KEYS[1], pod, generation)
redis.call('DEL', KEYS[2])
for i = 8, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('SET', KEYS[3], generation, 'PX', ARGV[4])
redis.call('SET', KEYS[4], ARGV[7], 'PX', ARGV[4])

-- Slots are given in turn, so that a number comes again only after 65,535 registrations: postings of its former owner
-- are swept by then. The epoch tells readers that all numbers changed their meaning.
local own, slot = pod .. ':' .. generation, nil
local slots = redis.call('HGETALL', KEYS[7])
if #slots == 0 then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[7], 'epoch', time[1] .. '.' .. time[2])
end
local taken = {}
for i = 1, #slots, 2 do
  local owner = slots[i + 1]
  taken[slots[i]] = true
  if owner == own then
    slot = slots[i]
  elseif string.sub(owner, 1, #pod + 1) == pod .. ':' then
    redis.call('HDEL', KEYS[7], slots[i])
    redis.call('HSET', KEYS[8], 'pending', 2)
  end
end
while not slot do
  local next = tostring(redis.call('HINCRBY', KEYS[8], 'next', 1) % 65535 + 1)
  if not taken[next] then
    slot = next
    redis.call('HSET', KEYS[7], slot, own)
  end
end
redis.call('HINCRBY', KEYS[7], 'version', 1) -- of the info of all pods
for _, key in ipairs({KEYS[1], KEYS[7], KEYS[8]}) do
  redis.call('EXPIRE', key, ARGV[6])
end
return tonumber(slot)
