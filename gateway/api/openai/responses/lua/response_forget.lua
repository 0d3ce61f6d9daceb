-- Deletes a response of a tenant. Returns 1 if it was stored, else 0.
-- KEYS: ids, sizes, total   ARGV: prefix of entries, id
local deleted = redis.call('UNLINK', ARGV[1] .. ARGV[2])
local size = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or 0)
if size > 0 then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('ZREM', KEYS[1], ARGV[2])
  redis.call('DECRBY', KEYS[3], size)
end
return deleted
