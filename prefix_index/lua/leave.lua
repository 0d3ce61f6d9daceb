-- Removes a pod that drains. Has no effect for a generation that is not the registered one.
-- KEYS: pods, info, lease, load, device, host, disk, seq, resv, resv_tokens, where, slots, sweep
-- ARGV: pod, generation, slot
-- Returns the number of pods that remain registered, or -1 if nothing was removed.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return -1
end
redis.call('HDEL', KEYS[1], ARGV[1])
for i = 2, 10 do
  redis.call('UNLINK', KEYS[i])
end
if redis.call('HGET', KEYS[12], ARGV[3]) == ARGV[1] .. ':' .. ARGV[2] then
  redis.call('HDEL', KEYS[12], ARGV[3])
  redis.call('HSET', KEYS[13], 'pending', 2)
end
local left = redis.call('HLEN', KEYS[1])
if left == 0 then
  redis.call('UNLINK', KEYS[11], KEYS[12], KEYS[13])
end
return left
