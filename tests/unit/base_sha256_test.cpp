// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// SHA-256 against NIST's example messages (FIPS 180 examples) and HMAC against RFC 4231.
#include "base/sha256.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/random.hpp"

namespace marrow::base {
namespace {

std::span<const std::byte> bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string digest(const std::string& text) { return hex(sha256(bytes(text))); }
std::string mac(const std::string& key, const std::string& text) {
  return hex(hmac_sha256(bytes(key), {bytes(text)}));
}

TEST(Sha256, NistExamples) {
  EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                   "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(digest(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesGiveTheSameDigestAsTheWhole) {
  std::string text(300, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7);
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    Sha256 hash;
    hash.update(bytes(text).first(cut));
    hash.update(bytes(text).subspan(cut));
    ASSERT_EQ(hex(hash.finish()), digest(text)) << "cut at " << cut;
  }
}

TEST(HmacSha256, Rfc4231) {
  EXPECT_EQ(mac(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(mac("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(mac(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (char c = 1; c <= 25; ++c) key.push_back(c);
  EXPECT_EQ(mac(key, std::string(50, '\xcd')),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(mac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(mac(std::string(131, '\xaa'),
                "This is a test using a larger than block-size key and a larger than block-size "
                "data. The key needs to be hashed before being used by the HMAC algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(HmacSha256, PartsAreConcatenated) {
  std::string a = "alpha";
  std::string b = "beta";
  EXPECT_EQ(hex(hmac_sha256(bytes("k"), {bytes(a), bytes(b)})), mac("k", a + b));
}

TEST(ConstantTimeEqual, ComparesLengthAndContent) {
  EXPECT_TRUE(constant_time_equal(bytes("same"), bytes("same")));
  EXPECT_FALSE(constant_time_equal(bytes("same"), bytes("sama")));
  EXPECT_FALSE(constant_time_equal(bytes("same"), bytes("sam")));
}

TEST(Random, NamesDiffer) {
  EXPECT_NE(random_name(), random_name());
  EXPECT_EQ(random_name(4).size(), 8u);
  EXPECT_NE(random_u64(), random_u64());
}

}  // namespace
}  // namespace marrow::base
