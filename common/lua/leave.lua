-- Removes a pod that leaves in order; without effect for another generation than the registered one.
-- KEYS: pods, info, lease, load, own, seq, resv, resv_tokens   ARGV: pod, generation
-- Returns how many pods stay registered, or -1 when nothing was removed.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return -1
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
return redis.call('HLEN', KEYS[1])
