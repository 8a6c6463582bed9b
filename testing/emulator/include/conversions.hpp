// Bits of floats, and conversions of short floats with the results of the device's own. Both languages use it; it includes nothing.

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

namespace emulator {

// The float next to a double, with a last bit of 1 if it is not the double. A rounding of it is that of the double.
inline float to_odd(double v) {
    const float f = (float)v;
    if ((double)f == v || v != v || __builtin_isinf(v)) return f;
    const unsigned u = bits_of(f);
    return float_of((__builtin_fabs((double)f) > __builtin_fabs(v) ? u - 1 : u) | 1u);
}

inline unsigned short to_bf16(float f) {
    const unsigned u = bits_of(f);
    return f != f ? 0x7fff : (unsigned short)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
inline float from_bf16(unsigned short b) { return float_of((unsigned)b << 16); }

// A float of 8 bits: FRACTION bits behind the point, the weight of the last bit of the smallest, and the code of the largest.
template <int FRACTION, int LAST, unsigned LARGEST> inline float from_fp8(unsigned char v) {
    const unsigned magnitude = v & 0x7fu, exponent = magnitude >> FRACTION, fraction = magnitude & ((1u << FRACTION) - 1u);
    float f = __builtin_ldexpf((float)(exponent == 0 ? fraction : fraction + (1u << FRACTION)), exponent == 0 ? LAST : (int)exponent - 1 + LAST);
    if (magnitude > LARGEST) f = magnitude == LARGEST + 1 && LARGEST != 0x7e ? __builtin_inff() : __builtin_nanf("");
    return v & 0x80u ? -f : f;
}
template <int FRACTION, int LAST, unsigned LARGEST> inline unsigned char to_fp8(float f) {
    if (f != f) return 0x7f;
    const unsigned char sign = (unsigned char)(bits_of(f) >> 31 << 7);
    const float magnitude = __builtin_fabsf(f);
    // What is too large becomes the largest.
    if (magnitude >= from_fp8<FRACTION, LAST, LARGEST>(LARGEST)) return sign | LARGEST;
    if (magnitude == 0.0f) return sign;
    int exponent;
    __builtin_frexpf(magnitude, &exponent);
    const int last = exponent - 1 - FRACTION < LAST ? LAST : exponent - 1 - FRACTION;
    const unsigned units = (unsigned)__builtin_nearbyintf(__builtin_ldexpf(magnitude, -last));
    // A carry of the rounding goes into the exponent by itself.
    return sign | (unsigned char)(((unsigned)(last - LAST) << FRACTION) + units);
}

}  // namespace emulator
