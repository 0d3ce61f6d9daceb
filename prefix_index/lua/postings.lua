-- Functions of scripts that change postings. `where` maps a sampled block hash to its posting: the slots of the pods
-- that hold the block, 2 bytes each. Postings only speed up look-ups; a pod's sets decide which blocks it holds.

-- Runs a command (SADD, SREM) with packed hashes, 8 bytes each; returns the sampled ones: one in `every`.
local function each(command, key, packed, every)
  local sampled = {}
  for first = 1, #packed, 8000 do
    local members = {}
    for at = first, math.min(first + 7999, #packed), 8 do
      local hash = string.sub(packed, at, at + 7)
      members[#members + 1] = hash
      if string.byte(hash) % every == 0 then
        sampled[#sampled + 1] = hash
      end
    end
    redis.call(command, key, unpack(members))
  end
  return sampled
end

-- Position of a slot in a posting, or nil.
local function place(posting, slot)
  local at = string.find(posting, slot, 1, true)
  while at and at % 2 == 0 do
    at = string.find(posting, slot, at + 1, true)
  end
  return at
end

-- Adds a slot to the postings of the hashes (add), or removes it.
local function change_postings(where, hashes, slot, add)
  for first = 1, #hashes, 1000 do
    local last = math.min(first + 999, #hashes)
    local postings = redis.call('HMGET', where, unpack(hashes, first, last))
    local changed, emptied = {}, {}
    for i = first, last do
      local posting = postings[i - first + 1] or ''
      local at = place(posting, slot)
      if add and not at then
        changed[#changed + 1] = hashes[i]
        changed[#changed + 1] = posting .. slot
      elseif at and not add then
        posting = string.sub(posting, 1, at - 1) .. string.sub(posting, at + 2)
        if posting == '' then
          emptied[#emptied + 1] = hashes[i]
        else
          changed[#changed + 1] = hashes[i]
          changed[#changed + 1] = posting
        end
      end
    end
    if #changed > 0 then
      redis.call('HSET', where, unpack(changed))
    end
    if #emptied > 0 then
      redis.call('HDEL', where, unpack(emptied))
    end
  end
end
