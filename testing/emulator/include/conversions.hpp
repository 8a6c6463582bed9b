// Bits of floats, and conversions of halves with the results of the device's own. Both languages use it; it includes nothing.

#pragma once

namespace emulator {

inline unsigned bits_of(float f) {
    unsigned u;
    __builtin_memcpy(&u, &f, 4);
    return u;
}
inline float float_of(unsigned u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

}  // namespace emulator

inline float f16_to_f32(unsigned short h) {
    const unsigned sign = (unsigned)(h >> 15) << 31, exponent = (h >> 10) & 31u, fraction = h & 1023u;
    if (exponent == 31) return emulator::float_of(sign | 0x7f800000u | (fraction == 0 ? 0 : 0x400000u | (fraction << 13)));
    const float magnitude = exponent == 0 ? __builtin_ldexpf((float)fraction, -24)
                                          : __builtin_ldexpf((float)(1024u + fraction), (int)exponent - 25);
    return sign ? -magnitude : magnitude;
}

inline unsigned short f32_to_f16(float f) {
    const unsigned short sign = (unsigned short)((emulator::bits_of(f) >> 31) << 15);
    if (f != f) return 0x7fff;
    const float magnitude = __builtin_fabsf(f);
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude == 0.0f) return sign;
    int exponent;
    __builtin_frexpf(magnitude, &exponent);
    // The weight of the last bit; half of the smallest for what is below the normal ones.
    const int last = exponent - 11 < -24 ? -24 : exponent - 11;
    const unsigned units = (unsigned)__builtin_nearbyintf(__builtin_ldexpf(magnitude, -last));
    // A carry of the rounding goes into the exponent by itself.
    return last == -24 ? sign | (unsigned short)units
                       : sign | (unsigned short)(((unsigned)(last + 24) << 10) + units);
}
