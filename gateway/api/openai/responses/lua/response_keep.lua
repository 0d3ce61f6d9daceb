-- Stores a response of a tenant. Deletes its expired responses, and the oldest ones to make room.
-- KEYS: ids (ZSET id -> expiry in ms), sizes (HASH id -> bytes), total   All keys share one hash tag.
-- ARGV: prefix of entries, id, entry, TTL in ms, max bytes of the tenant
-- Returns 1, or 0 if the entry alone is too large.
local prefix, id, entry, ttl, max_bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if #entry > max_bytes then return 0 end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local total = tonumber(redis.call('GET', KEYS[3]) or 0)
local function delete(old)
  total = total - tonumber(redis.call('HGET', KEYS[2], old) or 0)
  redis.call('HDEL', KEYS[2], old)
  redis.call('ZREM', KEYS[1], old)
  redis.call('UNLINK', prefix .. old)
end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do delete(old) end
if redis.call('HEXISTS', KEYS[2], id) == 1 then delete(id) end
while total + #entry > max_bytes do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest then total = 0 break end
  delete(oldest)
end
redis.call('SET', prefix .. id, entry, 'PX', ttl)
redis.call('ZADD', KEYS[1], now + ttl, id)
redis.call('HSET', KEYS[2], id, #entry)
redis.call('SET', KEYS[3], total + #entry)
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ttl) end
return 1
