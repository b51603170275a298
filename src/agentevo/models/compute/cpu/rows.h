#pragma once

/* Softmax of scores [length] in place, beside one more score `sink` unless it is NULL. A lane's sum
 * has every WIDTH-th number, so that numbers of -inf change nothing wherever they stand. */
void softmax(float *scores, long length, const float *sink);
