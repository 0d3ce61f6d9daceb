-- The live pods of a scope: slot and load of each, and its info if it changed since the caller's version.
-- KEYS: pods, slots   ARGV: key prefix, version of the info that the caller knows
-- Returns {epoch of the slots, version, per pod {pod, generation, slot or '', load or '', info}}; info is {field,
-- value, ...}, or empty if the version is the caller's.
local prefix = ARGV[1]
local state = redis.call('HMGET', KEYS[2], 'epoch', 'version')
local epoch = state[1] or ''
local version = epoch .. '/' .. (state[2] or '')
local slot_of = {}
local slots = redis.call('HGETALL', KEYS[2])
for i = 1, #slots, 2 do
  slot_of[slots[i + 1]] = slots[i]
end
local live = {}
local registered = redis.call('HGETALL', KEYS[1])
for first = 1, #registered, 2000 do
  local last = math.min(first + 1999, #registered)
  local names = {}
  for i = first, last, 2 do
    names[#names + 1] = prefix .. 'lease:' .. registered[i]
    names[#names + 1] = prefix .. 'load:' .. registered[i]
  end
  local found = redis.call('MGET', unpack(names))
  for i = first, last, 2 do
    local pod, generation = registered[i], registered[i + 1]
    if found[i - first + 1] == generation then
      live[#live + 1] = {
        pod, generation, slot_of[pod .. ':' .. generation] or '', found[i - first + 2] or '',
        version == ARGV[2] and {} or redis.call('HGETALL', prefix .. 'info:' .. pod),
      }
    end
  end
end
return {epoch, version, live}
