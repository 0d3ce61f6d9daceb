-- The live pods of a scope: their slots, info, load and booked tokens.
-- KEYS: pods, slots   ARGV: key prefix
-- Returns {epoch of the slots, per pod {pod, generation, slot or '', load or '', booked tokens, {field, value, ...}}}.
local prefix = ARGV[1]
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local live, slot_of = {}, {}
local slots = redis.call('HGETALL', KEYS[2])
for i = 1, #slots, 2 do
  slot_of[slots[i + 1]] = slots[i]
end
local registered = redis.call('HGETALL', KEYS[1])
for i = 1, #registered, 2 do
  local pod, generation = registered[i], registered[i + 1]
  if redis.call('GET', prefix .. 'lease:' .. pod) == generation then
    local booked = 0
    for _, request in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'resv:' .. pod, '(' .. now, '+inf')) do
      booked = booked + tonumber(redis.call('HGET', prefix .. 'resv_tokens:' .. pod, request) or 0)
    end
    live[#live + 1] = {
      pod, generation, slot_of[pod .. ':' .. generation] or '', redis.call('GET', prefix .. 'load:' .. pod) or '',
      booked, redis.call('HGETALL', prefix .. 'info:' .. pod),
    }
  end
end
return {redis.call('HGET', KEYS[2], 'epoch') or '', live}
