-- Applies one numbered batch of changes to a pod's sets, and to the postings of its sampled blocks.
-- KEYS: lease, seq, device, host, disk, where, slots   ARGV: generation, batch number, TTL in s, slot (2 bytes),
--       sampling, stored and evicted hashes of the device, of the host, of the disk (packed, 8 bytes each)
-- Returns 'ok', 'duplicate' (nothing done), 'gap' (send a snapshot) or 'fenced' (register again).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'fenced'
end
local last, number = tonumber(redis.call('GET', KEYS[2]) or -1), tonumber(ARGV[2])
if last < 0 or number > last + 1 then
  return 'gap'
end
if number <= last then
  return 'duplicate'
end
local slot, every = ARGV[4], tonumber(ARGV[5])
local gone, new = {}, {}
for tier = 1, 3 do
  gone[tier] = each('SREM', KEYS[2 + tier], ARGV[5 + 2 * tier], every)
  new[tier] = each('SADD', KEYS[2 + tier], ARGV[4 + 2 * tier], every)
end
for _, hashes in ipairs(gone) do
  local lost = {}
  for _, hash in ipairs(hashes) do
    if redis.call('SISMEMBER', KEYS[3], hash) == 0 and redis.call('SISMEMBER', KEYS[4], hash) == 0
      and redis.call('SISMEMBER', KEYS[5], hash) == 0 then
      lost[#lost + 1] = hash
    end
  end
  change_postings(KEYS[6], lost, slot, false)
end
for _, hashes in ipairs(new) do
  change_postings(KEYS[6], hashes, slot, true)
end
for tier, flag in ipairs({'hosts', 'disks'}) do -- look-ups read these tiers from now on
  if #ARGV[6 + 2 * tier] > 0 then
    redis.call('HSET', KEYS[7], flag, 1)
  end
end
for i = 3, 6 do
  redis.call('EXPIRE', KEYS[i], ARGV[3])
end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 'ok'
