#pragma once

/* Softmax of scores [length] in place. A lane's sum has every WIDTH-th number, so that numbers of
 * -inf change nothing wherever they stand. */
void softmax(float *scores, long length);
