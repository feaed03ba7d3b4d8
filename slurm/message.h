/* The prefix of the plugin's messages, and their safe form for a user's text. */
#ifndef GEMINI_MESSAGE_H
#define GEMINI_MESSAGE_H

#define MESSAGE_PREFIX "gemini-hpc: "

enum { MESSAGE_SHOWN_SIZE = 80 };

/*
 * Makes a user's text fit for one line of a terminal or log: shortened, unprintable bytes shown as '?'.
 * Returns `shown`.
 */
const char *message_shown(const char *text, char shown[MESSAGE_SHOWN_SIZE]);

#endif
