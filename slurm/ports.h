/*
 * MASTER_PORT, equal on all nodes without communication between them. Each of 500 consecutive job numbers has
 * its own base, and each of 16 consecutive steps its own port. All ports lie between 24000 and 31999, below
 * the ports that kernels give to clients.
 */
#ifndef GEMINI_PORTS_H
#define GEMINI_PORTS_H

#include <stdint.h>

enum { PORTS_BASE = 24000, PORTS_BLOCKS = 500, PORTS_SPREAD = 16 };

/* Returns the base port of an incarnation; the agents' map has the same (wire/ports.py). */
static inline uint16_t ports_base(uint32_t job, uint32_t restart)
{
	return (uint16_t)(PORTS_BASE + ((uint64_t)job * 7 + restart) % PORTS_BLOCKS * PORTS_SPREAD);
}

static inline uint32_t ports_of_step(uint16_t base, uint32_t step)
{
	return (uint32_t)base + step % PORTS_SPREAD;
}

#endif
