-- How many blocks of a chain pods hold, from its start. All tiers of a pod together are prefix-closed (eviction is
-- leaf-first), and so is its device, so a longest match is found by probing.
--
-- Postings say at which sampled blocks of the chain the pods drop out; the search narrows down to the levels where that
-- happens, so its cost depends on how different the pods are, not on how many there are. Then the sets of some pods are
-- searched from there, which gives exact figures: of the pods that the caller names, or of the best MOST.
--
-- KEYS: where, slots   ARGV: key prefix, chain (packed, 8 bytes each), positions of its sampled blocks (4 bytes each),
--       then the pods, if they are few: name, generation, slot ('' when unknown), ...
-- Returns {epoch of the slots, levels, rows}: levels as blocks, slots that hold so many (packed), ..., ascending, none
-- when pods are named; rows as pod:generation, blocks on the device, blocks in all, ... of the pods searched, -1 in all
-- for a pod whose lease is not of that generation.
local MOST = 16
local FAN, WINDOW = 16, 24
local prefix, chain, positions = ARGV[1], ARGV[2], ARGV[3]
local length, samples = #chain / 8, #positions / 4
local named = #ARGV > 3

local function block(n)
  return string.sub(chain, 8 * n - 7, 8 * n)
end

local function position(i)
  local a, b, c = string.byte(positions, 4 * i - 3, 4 * i - 1)
  return a + 256 * b + 65536 * c
end

-- 1. Levels: i -> posting of the i-th sampled block, for as many i as it takes.
local postings, seen, budget = {}, {}, 64

local function fetch(indices)
  budget = budget - 1
  local hashes = {}
  for j, i in ipairs(indices) do
    hashes[j] = block(position(i))
  end
  for j, posting in ipairs(redis.call('HMGET', KEYS[1], unpack(hashes))) do
    postings[indices[j]] = posting or ''
    seen[#seen + 1] = indices[j]
  end
end

-- Sets of holders only shrink along a chain, so equal sizes mean equal sets, and nothing happens between.
local function divide(low, high)
  if high - low < 2 or budget == 0 or (low > 0 and #postings[low] == #postings[high]) then
    return
  end
  local step, indices = math.ceil((high - low) / FAN), {}
  for i = low + step, high - 1, step do
    indices[#indices + 1] = i
  end
  fetch(indices)
  for j = #indices, 0, -1 do
    divide(j == 0 and low or indices[j], indices[j + 1] or high)
  end
end

if samples > 0 then
  local indices, i = {}, 1
  while i < samples do
    indices[#indices + 1] = i
    i = 2 * i
  end
  indices[#indices + 1] = samples
  fetch(indices)
  for j = #indices - 1, 1, -1 do
    divide(indices[j], indices[j + 1])
  end
  table.sort(seen)
end

local levels = {} -- ascending: {blocks, slots, blocks at the next sample that was looked at}
for j, i in ipairs(seen) do
  local posting, after = postings[i], postings[seen[j + 1]] or ''
  if posting ~= '' and #after < #posting then
    levels[#levels + 1] = {position(i), posting, seen[j + 1] and position(seen[j + 1]) or length}
  end
end

-- 2. Exact figures from a pod's sets, starting where the postings say that it drops out.
local info = redis.call('HMGET', KEYS[2], 'epoch', 'hosts')
local windows = {}

-- The numbers and the hashes of a few blocks.
local function window(first, last)
  local key = first * 65536 + last
  if not windows[key] then
    local numbers, hashes = {}, {}
    for n = math.max(first, 1), math.min(length, first + WINDOW, math.max(last, first + 3)) do
      numbers[#numbers + 1] = n
      hashes[#hashes + 1] = block(n)
    end
    windows[key] = {numbers, hashes}
  end
  return windows[key]
end

-- The longest n for which set holds blocks low+1 to n, given that it holds all up to low. Between first and last is
-- where it probably ends.
local function search(set, low, first, last)
  local high = length + 1
  local function narrow(numbers, hashes)
    for j, held in ipairs(redis.call('SMISMEMBER', set, unpack(hashes))) do
      if held == 0 then
        high = math.min(high, numbers[j])
        return
      end
      low = math.max(low, numbers[j])
    end
  end
  local tried = window(first, last)
  narrow(tried[1], tried[2])
  while high - low > 1 do
    local step, numbers, hashes = math.ceil((high - low) / FAN), {}, {}
    for n = low + step, high - 1, step do
      numbers[#numbers + 1] = n
      hashes[#hashes + 1] = block(n)
    end
    narrow(numbers, hashes)
  end
  return low
end

local rows = {}

-- pods: {name, generation, first, last}, ...
local function search_all(pods)
  local leases = {}
  for i, pod in ipairs(pods) do
    leases[i] = prefix .. 'lease:' .. pod[1]
  end
  leases = #pods > 0 and redis.call('MGET', unpack(leases)) or {}
  for i, pod in ipairs(pods) do
    local owner = pod[1] .. ':' .. pod[2]
    local device, all = 0, -1
    if leases[i] == pod[2] then
      device = search(prefix .. 'own:' .. owner, 0, pod[3], pod[4])
      all = device
      local host = prefix .. 'host:' .. owner
      if info[2] and device < length and redis.call('SISMEMBER', host, block(device + 1)) == 1 then
        all = search(host, device + 1, device + 1, length)
      end
    end
    rows[#rows + 1] = owner
    rows[#rows + 1] = device
    rows[#rows + 1] = all
  end
end

if named then
  local pods = {}
  for i = 4, #ARGV, 3 do
    local first, last, slot = 0, 0, ARGV[i + 2]
    for j = slot == '' and 0 or #levels, 1, -1 do
      if place(levels[j][2], slot) then
        first, last = levels[j][1], levels[j][3]
        break
      end
    end
    pods[#pods + 1] = {ARGV[i], ARGV[i + 1], first, last}
  end
  search_all(pods)
  return {info[1] or '', {}, rows}
end

-- Whole levels only, from the deepest: half a level searched would look better than its other half.
local done, pods = {}, {}
for j = #levels, 1, -1 do
  local slots, names = {}, {}
  for at = 1, #levels[j][2], 2 do
    local slot = string.sub(levels[j][2], at, at + 1)
    if not done[slot] then
      slots[#slots + 1] = slot
      names[#names + 1] = tostring(struct.unpack('<I2', slot))
      if #pods + #slots > MOST then
        break
      end
    end
  end
  if #pods + #slots > MOST then
    break
  end
  for i, owner in ipairs(#names > 0 and redis.call('HMGET', KEYS[2], unpack(names)) or {}) do
    done[slots[i]] = true
    local pod, generation = string.match(owner or '', '^(.*):(%d+)$')
    if pod then
      pods[#pods + 1] = {pod, generation, levels[j][1], levels[j][3]}
    end
  end
end
search_all(pods)
local flat = {}
for _, level in ipairs(levels) do
  flat[#flat + 1] = level[1]
  flat[#flat + 1] = level[2]
end
return {info[1] or '', flat, rows}
