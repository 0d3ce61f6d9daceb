-- Adds a slice of a snapshot to its shadow set, and to the postings of its sampled blocks.
-- KEYS: lease, shadow, where   ARGV: generation, TTL in s, slot (2 bytes), sampling, hashes (packed, 8 bytes each)
-- Returns 'ok' or 'fenced'.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'fenced'
end
change_postings(KEYS[3], each('SADD', KEYS[2], ARGV[5], tonumber(ARGV[4])), ARGV[3], true)
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[2])
return 'ok'
