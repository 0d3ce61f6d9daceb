-- Books uncached tokens of a request on a pod until it expires, after dropping bookings that did.
-- KEYS: resv, resv_tokens   ARGV: request, tokens, TTL in ms
-- Returns the tokens booked on the pod, this request's included.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, 1000)
for _, request in ipairs(expired) do
  redis.call('ZREM', KEYS[1], request)
  redis.call('HDEL', KEYS[2], request)
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
-- The keys live as long as their last booking.
local last = tonumber(redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2])
local left = string.format('%.0f', last - now + 1000)
redis.call('PEXPIRE', KEYS[1], left)
redis.call('PEXPIRE', KEYS[2], left)
local booked = 0
for _, tokens in ipairs(redis.call('HVALS', KEYS[2])) do
  booked = booked + tonumber(tokens)
end
return booked
