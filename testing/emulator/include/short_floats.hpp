// The short floats of CUDA C++ with their pairs and functions: `__half`, `__nv_bfloat16`, and the types of 8 bits. An operation is one of
// `float`, rounded once more. `cuda_fp16.h`, `cuda_bf16.h` and `cuda_fp8.h` are this file.

#pragma once

// ---- A type with its conversions

#define EMULATOR_FROM(NAME, T) \
    NAME(T v) : NAME((double)v) {}
#define EMULATOR_TO(T, CONVERT) \
    explicit operator T() const { return (T)emulator::CONVERT((double)(float)*this); }
#define EMULATOR_CONVERTED(NAME, WORD, TO, FROM)                        \
    WORD __x;                                                           \
    NAME() = default;                                                   \
    NAME(float v) : __x(TO(v)) {}                                       \
    NAME(double v) : __x(TO(emulator::to_odd(v))) {}                    \
    EMULATOR_FROM(NAME, bool)                                           \
    EMULATOR_FROM(NAME, char)                                           \
    EMULATOR_FROM(NAME, signed char)                                    \
    EMULATOR_FROM(NAME, unsigned char)                                  \
    EMULATOR_FROM(NAME, short)                                          \
    EMULATOR_FROM(NAME, unsigned short)                                 \
    EMULATOR_FROM(NAME, int)                                            \
    EMULATOR_FROM(NAME, unsigned)                                       \
    EMULATOR_FROM(NAME, long)                                           \
    EMULATOR_FROM(NAME, unsigned long)                                  \
    EMULATOR_FROM(NAME, long long)                                      \
    EMULATOR_FROM(NAME, unsigned long long)                             \
    operator float() const { return FROM(__x); }                        \
    explicit operator bool() const { return (float)*this != 0.0f; }     \
    EMULATOR_TO(char, to_int)                                           \
    EMULATOR_TO(signed char, to_int)                                    \
    EMULATOR_TO(unsigned char, to_uint)                                 \
    EMULATOR_TO(short, to_int)                                          \
    EMULATOR_TO(unsigned short, to_uint)                                \
    EMULATOR_TO(int, to_int)                                            \
    EMULATOR_TO(unsigned, to_uint)                                      \
    EMULATOR_TO(long, to_longlong)                                      \
    EMULATOR_TO(unsigned long, to_ulonglong)                            \
    EMULATOR_TO(long long, to_longlong)                                 \
    EMULATOR_TO(unsigned long long, to_ulonglong)

// ---- Types of 16 bits

#define EMULATOR_NAMED(NAME, WORD, EXPRESSION)                                      \
    inline NAME __h##WORD(NAME a, NAME b) { return EXPRESSION; }                    \
    inline NAME __h##WORD##_rn(NAME a, NAME b) { return EXPRESSION; }               \
    inline NAME##2 __h##WORD##2(NAME##2 a, NAME##2 b) { return EXPRESSION; }        \
    inline NAME##2 __h##WORD##2_rn(NAME##2 a, NAME##2 b) { return EXPRESSION; }
#define EMULATOR_COMPARED(NAME, WORD, SIGN)                                         \
    inline bool operator SIGN(NAME a, NAME b) { return (float)a SIGN (float)b; }    \
    inline bool __h##WORD(NAME a, NAME b) { return a SIGN b; }
#define EMULATOR_UNARY(NAME, WORD, EXPRESSION)                                      \
    inline NAME h##WORD(NAME a) {                                                   \
        const float v = a;                                                          \
        return NAME(EXPRESSION);                                                    \
    }                                                                               \
    inline NAME##2 h2##WORD(NAME##2 a) { return {h##WORD(a.x), h##WORD(a.y)}; }
#define EMULATOR_SHORT(NAME, WORD, TO, FROM)                                                            \
    struct alignas(2) NAME {                                                                            \
        EMULATOR_CONVERTED(NAME, unsigned short, TO, FROM)                                              \
        NAME& operator+=(NAME b) { return *this = NAME((float)*this + (float)b); }                      \
        NAME& operator-=(NAME b) { return *this = NAME((float)*this - (float)b); }                      \
        NAME& operator*=(NAME b) { return *this = NAME((float)*this * (float)b); }                      \
        NAME& operator/=(NAME b) { return *this = NAME((float)*this / (float)b); }                      \
    };                                                                                                  \
    struct alignas(4) NAME##2 {                                                                         \
        NAME x, y;                                                                                      \
        NAME##2() = default;                                                                            \
        NAME##2(NAME x, NAME y) : x(x), y(y) {}                                                         \
    };                                                                                                  \
    inline NAME operator+(NAME a, NAME b) { return a += b; }                                            \
    inline NAME operator-(NAME a, NAME b) { return a -= b; }                                            \
    inline NAME operator*(NAME a, NAME b) { return a *= b; }                                            \
    inline NAME operator/(NAME a, NAME b) { return a /= b; }                                            \
    inline NAME operator+(NAME a) { return a; }                                                         \
    inline NAME operator-(NAME a) { return a.__x ^= 0x8000u, a; }                                       \
    inline NAME##2 operator+(NAME##2 a, NAME##2 b) { return {a.x + b.x, a.y + b.y}; }                   \
    inline NAME##2 operator-(NAME##2 a, NAME##2 b) { return {a.x - b.x, a.y - b.y}; }                   \
    inline NAME##2 operator*(NAME##2 a, NAME##2 b) { return {a.x * b.x, a.y * b.y}; }                   \
    inline NAME##2 operator/(NAME##2 a, NAME##2 b) { return {a.x / b.x, a.y / b.y}; }                   \
    inline NAME##2 operator-(NAME##2 a) { return {-a.x, -a.y}; }                                        \
    EMULATOR_COMPARED(NAME, eq, ==)                                                                     \
    EMULATOR_COMPARED(NAME, ne, !=)                                                                     \
    EMULATOR_COMPARED(NAME, lt, <)                                                                      \
    EMULATOR_COMPARED(NAME, le, <=)                                                                     \
    EMULATOR_COMPARED(NAME, gt, >)                                                                      \
    EMULATOR_COMPARED(NAME, ge, >=)                                                                     \
    EMULATOR_NAMED(NAME, add, a + b)                                                                    \
    EMULATOR_NAMED(NAME, sub, a - b)                                                                    \
    EMULATOR_NAMED(NAME, mul, a * b)                                                                    \
    inline NAME __hdiv(NAME a, NAME b) { return a / b; }                                                \
    inline NAME __hneg(NAME a) { return -a; }                                                           \
    inline NAME __habs(NAME a) { return a.__x &= 0x7fffu, a; }                                          \
    inline NAME __hmax(NAME a, NAME b) { return NAME(__builtin_fmaxf(a, b)); }                          \
    inline NAME __hmin(NAME a, NAME b) { return NAME(__builtin_fminf(a, b)); }                          \
    inline bool __hisnan(NAME a) { return a != a; }                                                     \
    inline int __hisinf(NAME a) { return __builtin_isinf_sign((float)a); }                              \
    /* The product is exact in a double. The sum is rounded to one first, which shows in rare cases. */ \
    inline NAME __hfma(NAME a, NAME b, NAME c) { return NAME((double)(float)a * (float)b + (float)c); } \
    inline NAME##2 __hfma2(NAME##2 a, NAME##2 b, NAME##2 c) {                                           \
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                          \
    }                                                                                                   \
    EMULATOR_UNARY(NAME, ceil, __builtin_ceilf(v))                                                      \
    EMULATOR_UNARY(NAME, cos, __builtin_cosf(v))                                                        \
    EMULATOR_UNARY(NAME, exp, __builtin_expf(v))                                                        \
    EMULATOR_UNARY(NAME, exp10, exp10f(v))                                                              \
    EMULATOR_UNARY(NAME, exp2, __builtin_exp2f(v))                                                      \
    EMULATOR_UNARY(NAME, floor, __builtin_floorf(v))                                                    \
    EMULATOR_UNARY(NAME, log, __builtin_logf(v))                                                        \
    EMULATOR_UNARY(NAME, log10, __builtin_log10f(v))                                                    \
    EMULATOR_UNARY(NAME, log2, __builtin_log2f(v))                                                      \
    EMULATOR_UNARY(NAME, rcp, 1.0f / v)                                                                 \
    EMULATOR_UNARY(NAME, rint, __builtin_nearbyintf(v))                                                 \
    EMULATOR_UNARY(NAME, rsqrt, rsqrtf(v))                                                              \
    EMULATOR_UNARY(NAME, sin, __builtin_sinf(v))                                                        \
    EMULATOR_UNARY(NAME, sqrt, __builtin_sqrtf(v))                                                      \
    EMULATOR_UNARY(NAME, tanh, __builtin_tanhf(v))                                                      \
    EMULATOR_UNARY(NAME, trunc, __builtin_truncf(v))                                                    \
    inline NAME __float2##WORD(float v) { return v; }                                                   \
    inline NAME __float2##WORD##_rn(float v) { return v; }                                              \
    inline NAME __double2##WORD(double v) { return v; }                                                 \
    inline float __##WORD##2float(NAME v) { return v; }                                                 \
    inline unsigned short __##WORD##_as_ushort(NAME v) { return v.__x; }                                \
    inline NAME __ushort_as_##WORD(unsigned short u) {                                                  \
        NAME v;                                                                                         \
        return v.__x = u, v;                                                                            \
    }                                                                                                   \
    inline NAME##2 make_##WORD##2(NAME x, NAME y) { return {x, y}; }                                    \
    inline NAME##2 __halves2##WORD##2(NAME x, NAME y) { return {x, y}; }                                \
    inline NAME##2 __##WORD##2##WORD##2(NAME v) { return {v, v}; }                                      \
    inline NAME##2 __floats2##WORD##2_rn(float x, float y) { return {x, y}; }                           \
    inline NAME##2 __float2##WORD##2_rn(float v) { return {v, v}; }                                     \
    inline NAME##2 __float22##WORD##2_rn(float2 v) { return {v.x, v.y}; }                               \
    inline float2 __##WORD##22float2(NAME##2 v) { return {v.x, v.y}; }                                  \
    inline NAME __low2##WORD(NAME##2 v) { return v.x; }                                                 \
    inline NAME __high2##WORD(NAME##2 v) { return v.y; }                                                \
    inline float __low2float(NAME##2 v) { return v.x; }                                                 \
    inline float __high2float(NAME##2 v) { return v.y; }                                                \
    EMULATOR_ATOMIC(atomicAdd, NAME, old + v)                                                           \
    EMULATOR_ATOMIC(atomicAdd, NAME##2, old + v)
EMULATOR_SHORT(__half, half, f32_to_f16, f16_to_f32)
EMULATOR_SHORT(__nv_bfloat16, bfloat16, emulator::to_bf16, emulator::from_bf16)
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// ---- Types of 8 bits

struct __nv_fp8_e4m3 {
    EMULATOR_CONVERTED(__nv_fp8_e4m3, unsigned char, (emulator::to_fp8<3, -9, 0x7e>), (emulator::from_fp8<3, -9, 0x7e>))
    explicit __nv_fp8_e4m3(__half v) : __nv_fp8_e4m3((float)v) {}
    explicit __nv_fp8_e4m3(__nv_bfloat16 v) : __nv_fp8_e4m3((float)v) {}
};
struct __nv_fp8_e5m2 {
    EMULATOR_CONVERTED(__nv_fp8_e5m2, unsigned char, (emulator::to_fp8<2, -16, 0x7b>), (emulator::from_fp8<2, -16, 0x7b>))
    explicit __nv_fp8_e5m2(__half v) : __nv_fp8_e5m2((float)v) {}
    explicit __nv_fp8_e5m2(__nv_bfloat16 v) : __nv_fp8_e5m2((float)v) {}
};
typedef unsigned char __nv_fp8_storage_t;
