-- Applies one numbered batch of changes to a pod's sets, and to the postings of its sampled blocks.
-- KEYS: lease, seq, device, host, where, slots   ARGV: generation, batch number, TTL in s, slot (2 bytes), sampling,
--       stored and evicted hashes of the device, then of the host (packed, 8 bytes each)
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
local gone = {each('SREM', KEYS[3], ARGV[7], every), each('SREM', KEYS[4], ARGV[9], every)}
local new = {each('SADD', KEYS[3], ARGV[6], every), each('SADD', KEYS[4], ARGV[8], every)}
for _, hashes in ipairs(gone) do
  local lost = {}
  for _, hash in ipairs(hashes) do
    if redis.call('SISMEMBER', KEYS[3], hash) == 0 and redis.call('SISMEMBER', KEYS[4], hash) == 0 then
      lost[#lost + 1] = hash
    end
  end
  change_postings(KEYS[5], lost, slot, false)
end
for _, hashes in ipairs(new) do
  change_postings(KEYS[5], hashes, slot, true)
end
if #ARGV[8] > 0 then
  redis.call('HSET', KEYS[6], 'hosts', 1) -- look-ups read host tiers from now on
end
for i = 3, 5 do
  redis.call('EXPIRE', KEYS[i], ARGV[3])
end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 'ok'
