-- Removes dead pods: the name after the info has expired, the slot after the sets have expired, and freed slots in a
-- part of the postings. Every pod calls it at heartbeats.
-- KEYS: slots, sweep, where, pods   ARGV: key prefix, seconds between checks of the slots, postings to check
-- Returns the number of remaining rounds over all postings, including the current one.
local prefix = ARGV[1]
local now = tonumber(redis.call('TIME')[1])
local state = redis.call('HMGET', KEYS[2], 'checked', 'pending', 'cursor')
local due = now - tonumber(state[1] or 0) >= tonumber(ARGV[2])
local pending = tonumber(state[2] or 0)
if not due and pending == 0 then
  return 0
end
if due then
  for _, pod in ipairs(redis.call('HKEYS', KEYS[4])) do
    if redis.call('EXISTS', prefix .. 'info:' .. pod) == 0 then
      redis.call('HDEL', KEYS[4], pod)
    end
  end
end
local live = {}
local slots = redis.call('HGETALL', KEYS[1])
for i = 1, #slots, 2 do
  local pod, generation = string.match(slots[i + 1], '^(.*):(%d+)$')
  if pod then
    if due and redis.call('GET', prefix .. 'lease:' .. pod) ~= generation
      and redis.call('EXISTS', prefix .. 'seq:' .. slots[i + 1]) == 0 then
      redis.call('HDEL', KEYS[1], slots[i])
      pending = 2 -- the current round may already be past postings with the slot
    else
      live[struct.pack('<I2', tonumber(slots[i]))] = true
    end
  end
end
local cursor = state[3] or '0'
if pending > 0 then
  local found = redis.call('HSCAN', KEYS[3], cursor, 'COUNT', ARGV[3])
  cursor = found[1]
  for i = 1, #found[2], 2 do
    local posting, kept = found[2][i + 1], {}
    for at = 1, #posting, 2 do
      local slot = string.sub(posting, at, at + 1)
      if live[slot] then
        kept[#kept + 1] = slot
      end
    end
    if #kept == 0 then
      redis.call('HDEL', KEYS[3], found[2][i])
    elseif 2 * #kept < #posting then
      redis.call('HSET', KEYS[3], found[2][i], table.concat(kept))
    end
  end
  if cursor == '0' then
    pending = pending - 1
  end
end
redis.call('HSET', KEYS[2], 'checked', due and now or state[1], 'pending', pending, 'cursor', cursor)
return pending
