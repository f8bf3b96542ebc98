/* The part of CUDA's header that tinygrad's renderer uses. Clang has arithmetic in f16 only on some processors, so a
 * half is rounded when it is stored and computed with as a float. */
#pragma once
struct half {
  __fp16 value;
  half() = default;
  template <class T> half(T of) : value((float)of) {}
  operator float() const { return value; }
};
inline half hexp2(half x) { return exp2((float)x); }
inline half hlog2(half x) { return log2((float)x); }
inline half hsin(half x) { return sin((float)x); }
inline half hsqrt(half x) { return sqrt((float)x); }
inline half htrunc(half x) { return trunc((float)x); }
inline half hrcp(half x) { return 1 / (float)x; }
