// Package crc combines cyclic redundancy checks of bytes that lie one behind the other.
package crc

import "math/bits"

// Combine returns the CRC of bytes with the CRC a, followed by n bytes with the CRC b. The polynomial is as in hash/crc32
// and hash/crc64: its highest bit is the coefficient of x^0.
func Combine[T uint32 | uint64](polynomial, a, b T, n int64) T {
	power := T(1) << (bits.Len64(uint64(^T(0))) - 1 - 8) // x to the power of 8: of one byte
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			a = multiply(polynomial, power, a)
		}
		power = multiply(polynomial, power, power)
	}
	return a ^ b
}

// multiply multiplies polynomials modulo another one.
func multiply[T uint32 | uint64](modulo, a, b T) (product T) {
	top := T(1) << (bits.Len64(uint64(^T(0))) - 1)
	for ; a != 0; a <<= 1 {
		if a&top != 0 {
			product ^= b
		}
		b = b>>1 ^ modulo&-(b&1)
	}
	return product
}
