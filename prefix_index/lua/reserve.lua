-- Chooses the cheapest pod of each group with what all gateways booked lately, and books the request there, at once: so
-- gateways that know the same do not all send to the same pod. Of equals the first is chosen.
-- KEYS: pods
-- ARGV: key prefix, request, life of bookings in ms, then for each group the number of its candidates and for each of
--       these: pod, its cost without bookings of the last ms, cost of a booked unit, units to book here, these ms
-- Returns, for each group, {index of the chosen one from 0, units that others booked on each lately}. The request's own
-- earlier booking is replaced.
local prefix, request, life = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- A booking's score is when it ends, so how long it still has says how old it is.
local function booked_since(pod, age)
  local after = string.format('(%.0f', now + math.max(0, life - age))
  local requests = redis.call('ZRANGEBYSCORE', prefix .. 'resv:' .. pod, after, '+inf', 'LIMIT', 0, 5000)
  if #requests == 0 then
    return 0
  end
  local booked = 0
  for i, units in ipairs(redis.call('HMGET', prefix .. 'resv_tokens:' .. pod, unpack(requests))) do
    if units and requests[i] ~= request then
      booked = booked + tonumber(units)
    end
  end
  return booked
end

local function book(pod, units)
  local ends, tokens = prefix .. 'resv:' .. pod, prefix .. 'resv_tokens:' .. pod
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', string.format('%.0f', now), 'LIMIT', 0, 1000)) do
    redis.call('ZREM', ends, old)
    redis.call('HDEL', tokens, old)
  end
  redis.call('ZADD', ends, string.format('%.0f', now + life), request)
  redis.call('HSET', tokens, request, units)
  redis.call('PEXPIRE', ends, life + 1000)
  redis.call('PEXPIRE', tokens, life + 1000)
end

local answers = {}
local at = 4
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  local answer, least, chosen = {0}, nil, nil
  for i = 0, count - 1 do
    local first = at + 1 + 5 * i
    local booked = booked_since(ARGV[first], tonumber(ARGV[first + 4]))
    local cost = tonumber(ARGV[first + 1]) + booked * tonumber(ARGV[first + 2])
    if least == nil or cost < least then
      answer[1], least, chosen = i, cost, first
    end
    answer[i + 2] = booked
  end
  if chosen then
    book(ARGV[chosen], ARGV[chosen + 3])
  end
  answers[#answers + 1] = answer
  at = at + 1 + 5 * count
end
return answers
