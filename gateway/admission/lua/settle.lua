-- A request has ended: refunds the tokens that it took and did not use, charges those that it used beyond.
-- KEYS: as of take
-- ARGV: now in ms (0: the server's clock), request, tokens per minute, tokens taken, tokens used, the day they were
--       taken on
-- Returns 1, or 0 if the request is not running; then nothing changes.
local now = tonumber(ARGV[1])
local tpm, unused = tonumber(ARGV[3]), tonumber(ARGV[4]) - tonumber(ARGV[5])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
if redis.call('ZREM', KEYS[2], ARGV[2]) == 0 then
  return 0
end
local state = redis.call('HMGET', KEYS[1], 'tokens', 'tokens_at', 'day', 'spent')
if state[1] and tpm > 0 then
  local level = math.min(tpm, tonumber(state[1]) + math.max(0, now - tonumber(state[2])) * tpm / 60000)
  redis.call('HSET', KEYS[1], 'tokens', string.format('%.17g', math.min(tpm, level + unused)), 'tokens_at', now)
end
if state[3] == ARGV[6] then
  redis.call('HSET', KEYS[1], 'spent', string.format('%.0f', math.max(0, tonumber(state[4]) - unused)))
end
return 1
