-- The number of leading blocks of a chain that pods hold. A pod's device is prefix-closed (eviction is leaf-first), so is
-- its disk, and so are all its tiers together. The longest match is therefore found by a search in the pod's sets.
--
-- The caller names the pods if they are few. Otherwise postings show at which sampled blocks the number of holders
-- drops. The search visits only these levels, so its cost depends on the number of different levels, not on the number
-- of pods. Then the sets of the best MOST pods are searched from there.
--
--   sampled blocks   s1        s2        s3        s4
--   holders          a b c d   a b c d   a b       a
--   levels                     s2: a b c d         s3: a b, s4: a
--
-- KEYS: where, slots   ARGV: key prefix, chain (packed, 8 bytes each), then either '' and the pods (name, generation,
--       ...), or positions of the chain's sampled blocks (4 bytes each)
-- Returns {epoch of the slots, levels, rows}. With named pods: no levels, and per pod three rows: blocks on the
-- device, in all tiers, and those of them that only the disk has. Otherwise: levels, ascending, as number of blocks and
-- packed slots of the pods that hold them; and per searched pod four rows, with pod:generation first. Pods without a
-- lease of the generation hold 0 blocks.
local MOST = 16
local FAN = 4 -- a probe is a cache miss in a large table and costs more than one more command
local call = redis.call
local prefix, chain, positions = ARGV[1], ARGV[2], ARGV[3]
local length, samples = #chain / 8, #positions / 4

local function block(n)
  return string.sub(chain, 8 * n - 7, 8 * n)
end

local function position(i)
  local a, b, c = string.byte(positions, 4 * i - 3, 4 * i - 1)
  return a + 256 * b + 65536 * c
end

local info = call('HMGET', KEYS[2], 'epoch', 'hosts', 'disks')
-- The most frequent result of searches with the same bounds, and its lead over other results (majority vote): a shared
-- prefix ends at the same block for most pods.
local likely, lead = {}, {}
local low, high -- state of the running search: the set holds block low, and does not hold block high

local function probe(set, n)
  if low < n and n < high then
    if call('SISMEMBER', set, block(n)) == 1 then
      low = n
    else
      high = n
    end
  end
end

-- The largest n so that the set holds blocks held+1 to n. The set is known to hold the blocks up to held. It should
-- hold block first, and not block last.
local function search(set, held, first, last)
  local key = first * 65536 + last
  local guess = likely[key]
  low, high = held, length + 1
  if guess then
    probe(set, guess + 1)
    probe(set, guess)
  end
  probe(set, first)
  if low == held then
    probe(set, held + 1)
  end
  probe(set, last)
  while high - low > 1 do
    local step, numbers, hashes = math.ceil((high - low) / FAN), {}, {}
    for n = low + step, high - 1, step do
      numbers[#numbers + 1] = n
      hashes[#hashes + 1] = block(n)
    end
    for j, member in ipairs(call('SMISMEMBER', set, unpack(hashes))) do
      if member == 0 then
        high = numbers[j]
        break
      end
      low = numbers[j]
    end
  end
  if low == guess then
    lead[key] = lead[key] + 1
  elseif (lead[key] or 0) == 0 then
    likely[key], lead[key] = low, 1
  else
    lead[key] = lead[key] - 1
  end
  return low
end

-- Leading blocks of a pod on the device, in all tiers, and those of the latter that only the disk has.
local function holds(owner, first, last)
  local device = search(prefix .. 'own:' .. owner, 0, first, last)
  local ends = {device, device}
  for tier, name in ipairs({'host:', 'disk:'}) do
    local set, held = prefix .. name .. owner, ends[1]
    if info[1 + tier] and held < length and call('SISMEMBER', set, block(held + 1)) == 1 then
      held = search(set, held + 1, held + 1, length + 1)
    end
    if tier == 1 then
      ends = {held, held}
    else
      ends[2] = held
    end
  end
  return device, ends[2], ends[2] - ends[1]
end

local function leases(names)
  local keys = {}
  for i, name in ipairs(names) do
    keys[i] = prefix .. 'lease:' .. name
  end
  return #keys > 0 and call('MGET', unpack(keys)) or {}
end

local rows = {}

if #ARGV > 3 then
  local names = {}
  for i = 4, #ARGV, 2 do
    names[#names + 1] = ARGV[i]
  end
  for i, generation in ipairs(leases(names)) do
    local device, all, disk = 0, 0, 0
    if generation == ARGV[2 * i + 3] then
      device, all, disk = holds(names[i] .. ':' .. generation, 0, length + 1)
    end
    rows[3 * i - 2], rows[3 * i - 1], rows[3 * i] = device, all, disk
  end
  return {info[1] or '', {}, rows}
end

-- postings[i]: posting of the i-th sampled block, for the indices that the search fetched; `seen` lists these.
local postings, seen, budget = {}, {}, 64

local function fetch(indices)
  budget = budget - 1
  local hashes = {}
  for j, i in ipairs(indices) do
    hashes[j] = block(position(i))
  end
  for j, posting in ipairs(call('HMGET', KEYS[1], unpack(hashes))) do
    postings[indices[j]] = posting or ''
    seen[#seen + 1] = indices[j]
  end
end

-- Sets of holders only shrink along a chain: equal sizes mean equal sets, with no level between.
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

local levels = {} -- ascending: {blocks, slots, blocks at the next sample looked at}
for j, i in ipairs(seen) do
  local posting, after = postings[i], postings[seen[j + 1]] or ''
  if posting ~= '' and #after < #posting then
    levels[#levels + 1] = {position(i), posting, seen[j + 1] and position(seen[j + 1]) or length + 1}
  end
end

-- Searches whole levels only, deepest first: exact results for a part of a level would look better than the rest.
local done, names, found = {}, {}, {}
for j = #levels, 1, -1 do
  local slots, numbers = {}, {}
  for at = 1, #levels[j][2], 2 do
    local slot = string.sub(levels[j][2], at, at + 1)
    if not done[slot] then
      slots[#slots + 1] = slot
      numbers[#numbers + 1] = tostring(struct.unpack('<I2', slot))
      if #found + #slots > MOST then
        break
      end
    end
  end
  if #found + #slots > MOST then
    break
  end
  for i, owner in ipairs(#numbers > 0 and call('HMGET', KEYS[2], unpack(numbers)) or {}) do
    done[slots[i]] = true
    local pod, generation = string.match(owner or '', '^(.*):(%d+)$')
    if pod then
      names[#names + 1] = pod
      found[#found + 1] = {owner, generation, levels[j][1], levels[j][3]}
    end
  end
end
for i, generation in ipairs(leases(names)) do
  local pod, device, all, disk = found[i], 0, 0, 0
  if generation == pod[2] then
    device, all, disk = holds(pod[1], pod[3], pod[4])
  end
  rows[#rows + 1] = pod[1]
  rows[#rows + 1] = device
  rows[#rows + 1] = all
  rows[#rows + 1] = disk
end
local flat = {}
for _, level in ipairs(levels) do
  flat[#flat + 1] = level[1]
  flat[#flat + 1] = level[2]
end
return {info[1] or '', flat, rows}
