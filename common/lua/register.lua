-- Enters a pod under its generation. An older generation than the registered one is refused; what the generation
-- before left behind is freed, and so are pods whose info expired long ago.
-- KEYS: pods, info, lease, load, resv, resv_tokens
-- ARGV: key prefix, pod, generation, lease in ms, info TTL in s, pods TTL in s, load, then info as field, value, ...
-- Returns 1, or 0 when refused.
local prefix, pod, generation = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('HGET', KEYS[1], pod)
if known and tonumber(known) > tonumber(generation) then
  return 0
end
if known and known ~= generation then
  local former = pod .. ':' .. known
  redis.call('UNLINK', prefix .. 'own:' .. former, prefix .. 'seq:' .. former, KEYS[5], KEYS[6])
end
for _, other in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('EXISTS', prefix .. 'info:' .. other) == 0 then
    redis.call('HDEL', KEYS[1], other)
  end
end
redis.call('HSET', KEYS[1], pod, generation)
redis.call('EXPIRE', KEYS[1], ARGV[6])
redis.call('DEL', KEYS[2])
for i = 8, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('SET', KEYS[3], generation, 'PX', ARGV[4])
redis.call('SET', KEYS[4], ARGV[7], 'PX', ARGV[4])
return 1
