-- Ends a booking, if there is one.
-- KEYS: resv, resv_tokens   ARGV: request
redis.call('ZREM', KEYS[1], ARGV[1])
return redis.call('HDEL', KEYS[2], ARGV[1])
