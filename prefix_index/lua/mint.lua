-- The generation of a starting pod: above every generation minted or registered before, and at least the pod's clock.
-- KEYS: pods, gen   ARGV: pod, now in ms, TTL in s
local last = math.max(tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0), tonumber(redis.call('GET', KEYS[2]) or 0))
local generation = string.format('%.0f', math.max(tonumber(ARGV[2]), last + 1))
redis.call('SET', KEYS[2], generation, 'EX', ARGV[3])
return generation
