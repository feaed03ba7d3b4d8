/* Strict decimal numbers: digits only, no sign, no blanks, no leading zeros. */
#ifndef GEMINI_NUMBER_H
#define GEMINI_NUMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Returns true and sets *out if the `len` bytes at `s` are one number within min..max. */
bool number_parse(const char *s, size_t len, uint64_t min, uint64_t max, uint64_t *out);

/* Both parse a whole string as `number_parse` does. */
bool number_parse_string(const char *s, uint64_t min, uint64_t max, uint64_t *out);
bool number_parse_u32(const char *s, uint32_t min, uint32_t max, uint32_t *out);

#endif
