-- Takes one request and its tokens from a key's limits: all of them, or none. Every limit of 0 is none.
-- Requests and tokens per minute are token buckets: full at first, refilled evenly. The day is UTC's.
-- KEYS: HASH of what is left, ZSET of running requests by when they are given up
-- ARGV: now in ms (0: the server's clock), request, requests per minute, tokens per minute, tokens per day, max
--       requests at once, tokens to take, life of a running request in ms, a day and what is known to be spent on it
-- Returns {what refuses it ('' when it was taken), ms to wait, requests left, ms until they are full, tokens left, ms
--          until they are full, the day}. Taking a request again changes nothing.
local now, id = tonumber(ARGV[1]), ARGV[2]
local rpm, tpm, tpd, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local cost, life = tonumber(ARGV[7]), tonumber(ARGV[8])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local day = math.floor(now / 86400000)
local state = redis.call('HMGET', KEYS[1], 'requests', 'requests_at', 'tokens', 'tokens_at', 'day', 'spent')

local function held(level, at, per_minute)
  if not level then
    return per_minute
  end
  return math.min(per_minute, tonumber(level) + math.max(0, now - tonumber(at)) * per_minute / 60000)
end

local requests, tokens = held(state[1], state[2], rpm), held(state[3], state[4], tpm)
local spent = tonumber(state[5]) == day and tonumber(state[6]) or 0
if tonumber(ARGV[9]) == day then
  spent = math.max(spent, tonumber(ARGV[10]))
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)

local refused, wait = '', 0
if not redis.call('ZSCORE', KEYS[2], id) then
  if tpd > 0 and spent + cost > tpd then
    refused, wait = 'day', (day + 1) * 86400000 - now
  elseif rpm > 0 and requests < 1 then
    refused, wait = 'requests', (1 - requests) * 60000 / rpm
  elseif tpm > 0 and tokens < cost then
    refused, wait = 'tokens', (cost - tokens) * 60000 / tpm
  elseif most > 0 and redis.call('ZCARD', KEYS[2]) >= most then
    refused, wait = 'concurrent', 1000
  else
    requests, tokens, spent = requests - 1, tokens - cost, spent + cost
    redis.call('HSET', KEYS[1], 'requests', string.format('%.17g', requests), 'requests_at', now,
      'tokens', string.format('%.17g', tokens), 'tokens_at', now, 'day', day, 'spent', string.format('%.0f', spent))
    redis.call('PEXPIRE', KEYS[1], 172800000)
    redis.call('ZADD', KEYS[2], now + life, id)
    redis.call('PEXPIRE', KEYS[2], 2 * life)
  end
end
local function full(level, per_minute)
  return per_minute > 0 and math.ceil((per_minute - level) * 60000 / per_minute) or 0
end
return {refused, math.ceil(wait), math.floor(math.max(0, requests)), full(requests, rpm),
  math.floor(math.max(0, tokens)), full(tokens, tpm), day}
