-- Chooses the cheapest pod of each group, counting the recent bookings of all gateways, and books the request on it, in
-- one atomic step. So gateways with the same view do not all choose the same pod. The first of equals is chosen.
-- KEYS: pods
-- ARGV: key prefix, request, TTL of bookings in ms, then per group the number of candidates, and per candidate: pod,
--       cost without recent bookings, cost per booked unit, units to book, age in ms up to which bookings are recent
-- Returns, per group, {index of the chosen candidate from 0, recently booked units of other requests per candidate}. An
-- earlier booking of the same request is replaced.
local prefix, request, life = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The score of a booking is its end; all bookings have the same TTL, so the end gives the age.
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
