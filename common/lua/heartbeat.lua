-- Renews a pod's lease and the life of its keys, publishes its load.
-- KEYS: pods, info, lease, load, own, seq   ARGV: pod, generation, lease in ms, load, own TTL, info TTL, pods TTL in s
-- Returns the size of the pod's set, or -1 when this generation has to register (again).
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] or redis.call('EXISTS', KEYS[2], KEYS[6]) < 2 then
  return -1
end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[4], ARGV[4], 'PX', ARGV[3])
redis.call('EXPIRE', KEYS[5], ARGV[5])
redis.call('EXPIRE', KEYS[6], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[7])
return redis.call('SCARD', KEYS[5])
