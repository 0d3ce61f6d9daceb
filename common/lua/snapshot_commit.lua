-- Makes a complete shadow set the pod's set; batches with numbers up to the snapshot's are duplicates from then on.
-- KEYS: lease, shadow, own, seq   ARGV: generation, snapshot's number, TTL in s, expected size
-- Returns 'ok', 'gap' (the shadow is not complete, or is older than the set) or 'fenced'.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'fenced'
end
local size = tonumber(ARGV[4])
if redis.call('SCARD', KEYS[2]) ~= size or tonumber(redis.call('GET', KEYS[4]) or -1) >= tonumber(ARGV[2]) then
  redis.call('UNLINK', KEYS[2])
  return 'gap'
end
redis.call('UNLINK', KEYS[3])
if size > 0 then
  redis.call('RENAME', KEYS[2], KEYS[3])
  redis.call('EXPIRE', KEYS[3], ARGV[3])
end
redis.call('SET', KEYS[4], ARGV[2], 'EX', ARGV[3])
return 'ok'
