-- Registers a pod's generation and gives it a slot, its number in postings. A generation older than the registered one
-- is refused; keys of the previous generation are freed. The cost does not depend on the number of pods, because
-- after a wipe of Redis all pods register at once.
-- KEYS: pods, info, lease, load, resv, resv_tokens, slots, sweep
-- ARGV: key prefix, pod, generation, lease in ms, info TTL in s, pods TTL in s, load, then info as field, value, ...
-- Returns the slot, 1 to 65535, or 0 if the pod is refused.
local prefix, pod, generation = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('HGET', KEYS[1], pod)
if known and tonumber(known) > tonumber(generation) then
  return 0
end
if known and known ~= generation then
  local former = pod .. ':' .. known
  for _, key in ipairs({'own:', 'host:', 'disk:', 'seq:'}) do
    redis.call('UNLINK', prefix .. key .. former)
  end
  redis.call('UNLINK', KEYS[5], KEYS[6])
end

-- Slots are assigned in turn. A slot is reused only after 65,535 registrations, when the postings of its former owner
-- are swept. A new epoch means that every slot has a new owner.
if redis.call('EXISTS', KEYS[7]) == 0 then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[7], 'epoch', time[1] .. '.' .. time[2])
end
local own, slot = pod .. ':' .. generation, redis.call('HGET', KEYS[2], 'slot')
local owner = slot and redis.call('HGET', KEYS[7], slot)
if owner ~= own then
  if owner and string.sub(owner, 1, #pod + 1) == pod .. ':' then
    redis.call('HDEL', KEYS[7], slot)
    redis.call('HSET', KEYS[8], 'pending', 2)
  end
  repeat
    slot = tostring(redis.call('HINCRBY', KEYS[8], 'next', 1) % 65535 + 1)
  until redis.call('HSETNX', KEYS[7], slot, own) == 1
end

redis.call('HSET', KEYS[1], pod, generation)
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], 'slot', slot, unpack(ARGV, 8))
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('SET', KEYS[3], generation, 'PX', ARGV[4])
redis.call('SET', KEYS[4], ARGV[7], 'PX', ARGV[4])
redis.call('HINCRBY', KEYS[7], 'version', 1) -- version of all pods' info
for _, key in ipairs({KEYS[1], KEYS[7], KEYS[8]}) do
  redis.call('EXPIRE', key, ARGV[6])
end
return tonumber(slot)
