#include "number.h"

#include <string.h>

bool number_parse(const char *s, size_t len, uint64_t min, uint64_t max, uint64_t *out)
{
	uint64_t value = 0;

	if (len == 0 || (len > 1 && s[0] == '0'))
		return false;
	for (size_t i = 0; i < len; i++) {
		if (s[i] < '0' || s[i] > '9')
			return false;
		const uint64_t digit = (uint64_t)(s[i] - '0');
		if (value > (UINT64_MAX - digit) / 10)
			return false;
		value = value * 10 + digit;
	}
	if (value < min || value > max)
		return false;
	*out = value;
	return true;
}

bool number_parse_string(const char *s, uint64_t min, uint64_t max, uint64_t *out)
{
	return number_parse(s, strlen(s), min, max, out);
}

bool number_parse_u32(const char *s, uint32_t min, uint32_t max, uint32_t *out)
{
	uint64_t value;

	if (!number_parse_string(s, min, max, &value))
		return false;
	*out = (uint32_t)value;
	return true;
}
