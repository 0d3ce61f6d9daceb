-- Renews a pod's lease and the TTLs of its keys, and publishes its load.
-- KEYS: pods, info, lease, load, device, host, disk, seq, where, slots, sweep
-- ARGV: pod, generation, slot, lease in ms, load, TTL of sets, of info, of pods in s
-- Returns the sizes of the pod's sets, or {-1} if this generation must register.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] or redis.call('EXISTS', KEYS[2], KEYS[8]) < 2
  or redis.call('HGET', KEYS[10], ARGV[3]) ~= ARGV[1] .. ':' .. ARGV[2] then
  return {-1}
end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[4])
redis.call('SET', KEYS[4], ARGV[5], 'PX', ARGV[4])
for i = 5, 9 do
  redis.call('EXPIRE', KEYS[i], ARGV[6])
end
redis.call('EXPIRE', KEYS[2], ARGV[7])
for _, key in ipairs({KEYS[1], KEYS[10], KEYS[11]}) do
  redis.call('EXPIRE', key, ARGV[8])
end
return {redis.call('SCARD', KEYS[5]), redis.call('SCARD', KEYS[6]), redis.call('SCARD', KEYS[7])}
