/* The arithmetic of exact sums (ADR-0063); `kernel.py` compiles and calls it.
 *
 * Every operation is one that IEEE 754 rounds once, or one on integers modulo 2^64. So no vector width, no
 * compiler and no order changes a bit, as long as nothing is contracted (-ffp-contract=off).
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default"))) /* chosen by the processor that runs it */
#else
#define VECTORS
#endif

static inline uint64_t word_of(double number) {
    uint64_t word;
    memcpy(&word, &number, sizeof word);
    return word;
}

static inline double number_of(uint64_t word) {
    double number;
    memcpy(&number, &word, sizeof number);
    return number;
}

static inline uint32_t magnitude_of(float number) {
    uint32_t word;
    memcpy(&word, &number, sizeof word);
    return word & 0x7fffffffu; /* ordered as |number|; NaN above infinity above all others */
}

/* round(gradient * 2^44), half to even, while |gradient| < 127: near the bias doubles are 2^-44 apart. */
#define BIAS 384.0
static inline uint64_t quantised(float gradient) { return word_of((double)gradient + BIAS) - word_of(BIAS); }

/* Each of the first two returns the word of the largest |gradient|, whatever it has added. */
VECTORS uint32_t dmsc_add(uint64_t *restrict sums, const float *restrict gradients, int64_t count) {
    int32_t most = 0; /* signed, because vectors of 32-bit words compare so */
    for (int64_t i = 0; i < count; i++) {
        int32_t own = (int32_t)magnitude_of(gradients[i]);
        most = own > most ? own : most;
        sums[i] += quantised(gradients[i]);
    }
    return (uint32_t)most;
}

VECTORS uint32_t dmsc_set(uint64_t *restrict sums, const float *restrict gradients, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t own = (int32_t)magnitude_of(gradients[i]);
        most = own > most ? own : most;
        sums[i] = quantised(gradients[i]);
    }
    return (uint32_t)most;
}

/* Takes back what `dmsc_add` added, be it of NaN. */
VECTORS void dmsc_take_back(uint64_t *restrict sums, const float *restrict gradients, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        sums[i] -= quantised(gradients[i]);
}

/* The double nearest to a signed number, half to even: its halves are put into doubles of 2^84 and 2^52, what
 * that adds is taken away exactly, and the last sum alone is rounded. Present vector units have no conversion. */
static inline double nearest(uint64_t number) {
    double low = number_of((number & 0xffffffffu) | 0x4330000000000000u);
    double high = number_of((number >> 32) ^ 0x4530000080000000u);
    return (high - (0x1p84 + 0x1p63 + 0x1p52)) + low;
}

/* means[i] = sums[i] / divisor, rounded to double and then to float. Returns the dot product of sums and weights
 * modulo 2^64. `factor` is 1 / divisor where that is exact, otherwise 0. */
VECTORS uint64_t dmsc_finish(float *restrict means, const uint64_t *restrict sums,
                             const uint64_t *restrict weights, int64_t count, double divisor, double factor) {
    uint64_t product = 0;
    if (factor != 0)
        for (int64_t i = 0; i < count; i++) {
            means[i] = (float)(nearest(sums[i]) * factor);
            product += sums[i] * weights[i];
        }
    else
        for (int64_t i = 0; i < count; i++) {
            means[i] = (float)(nearest(sums[i]) / divisor);
            product += sums[i] * weights[i];
        }
    return product;
}

/* The least of 4, 5, 6 and 8 bytes that hold each of these signed numbers. */
VECTORS int64_t dmsc_bytes_needed(const uint64_t *sums, int64_t count) {
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; i++)
        bits |= sums[i] ^ (uint64_t)((int64_t)sums[i] >> 63);
    return bits >> 31 == 0 ? 4 : bits >> 39 == 0 ? 5 : bits >> 47 == 0 ? 6 : 8;
}

/* Packed are first the lower four bytes of all numbers, then the others of all. */
VECTORS void dmsc_pack(uint32_t *restrict packed, const uint64_t *restrict sums, int64_t count, int64_t bytes) {
    uint8_t *restrict fifth = (uint8_t *)(packed + count);
    uint16_t *restrict upper = (uint16_t *)(packed + count);
    uint32_t *restrict upmost = packed + count;
    for (int64_t i = 0; i < count; i++)
        packed[i] = (uint32_t)sums[i];
    if (bytes == 5)
        for (int64_t i = 0; i < count; i++)
            fifth[i] = (uint8_t)(sums[i] >> 32);
    else if (bytes == 6)
        for (int64_t i = 0; i < count; i++)
            upper[i] = (uint16_t)(sums[i] >> 32);
    else if (bytes == 8)
        for (int64_t i = 0; i < count; i++)
            upmost[i] = (uint32_t)(sums[i] >> 32);
}

VECTORS void dmsc_add_packed(uint64_t *restrict sums, const uint32_t *restrict packed, int64_t count,
                             int64_t bytes) {
    const int8_t *restrict fifth = (const int8_t *)(packed + count);
    const int16_t *restrict upper = (const int16_t *)(packed + count);
    const int32_t *restrict upmost = (const int32_t *)(packed + count);
    if (bytes == 4)
        for (int64_t i = 0; i < count; i++)
            sums[i] += (uint64_t)(int64_t)(int32_t)packed[i];
    else if (bytes == 5)
        for (int64_t i = 0; i < count; i++)
            sums[i] += ((uint64_t)(int64_t)fifth[i] << 32) + packed[i];
    else if (bytes == 6)
        for (int64_t i = 0; i < count; i++)
            sums[i] += ((uint64_t)(int64_t)upper[i] << 32) + packed[i];
    else
        for (int64_t i = 0; i < count; i++)
            sums[i] += ((uint64_t)(int64_t)upmost[i] << 32) + packed[i];
}
