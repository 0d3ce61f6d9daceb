-- Requests that still run are not given up.
-- KEYS: ZSET of running requests by when they are given up
-- ARGV: life of a running request in ms, requests
local time = redis.call('TIME')
local life = tonumber(ARGV[1])
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + life
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 2 * life)
return 1
