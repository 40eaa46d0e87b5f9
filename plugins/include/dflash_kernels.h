/* CUDA kernels of a DFlash decoding step, as a plain C interface.
 *
 * Letters: B slots in the call, Q rows a slot, Hq query heads, Hkv key/value heads, D head size, S cache length,
 * H hidden size, F feed-forward size, V vocabulary, R logit rows, G segments, N flat rows. Strides count elements; the
 * last dimension is always contiguous. Pointers are device pointers unless said otherwise, 16-byte aligned where rows
 * of tensors begin.
 *
 * A segment is one slot's run of a step's flat rows, four numbers: slot, start (the position of its first row), the
 * first of its rows, and their count; 0: it is idle. Rows that belong to no segment are padding.
 *
 * Caches are [B, Hkv, S, D], one run of S rows a slot, or pages [pages, Hkv, page_rows, D] with a page table [slots,
 * width]: position p of slot s is row p % page_rows of page page_table[s, p / page_rows]. page_rows is a multiple of 64
 * there, or width is 1. Of a table no entry is read that lies past a slot's length. A kernel that takes a page table
 * takes pages as slots: cache_slot_stride is a page's, cache_rows is width * page_rows.
 *
 * Every launcher enqueues on `stream`, allocates nothing, never synchronizes, and may be captured into a CUDA graph.
 * It returns cudaErrorInvalidValue for a shape that it does not compute. Sums are taken in FP32; where a PyTorch
 * composition of the same step would round to the tensor's type, these kernels round too.
 */
#ifndef DFLASH_KERNELS_H
#define DFLASH_KERNELS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every change of this file that a caller must follow. */
#define DFLASH_ABI_VERSION 42

#if defined(_WIN32)
#define DFLASH_API __declspec(dllexport)
#else
#define DFLASH_API __attribute__((visibility("default")))
#endif

typedef enum
{
    DFLASH_FP16 = 0,
    DFLASH_BF16 = 1,
    DFLASH_FP32 = 2, /* logits and attention's sinks only */
    DFLASH_FP8 = 3 /* E4M3; weights of products only: caches say it by their scales */
} dflash_dtype;

/* Rows of a slot whose drafts are a tree: each has a bit in a path. */
#define DFLASH_TREE_MOST_ROWS 64

/* Attention of a short block of rows over a long cache.
 *
 * Slot b has length = lengths[b] + (added ? added[b] : 0) + length_offset cache rows, its own Q rows being the last of
 * them: row i stands at position length - Q + i. At most cache_rows count. A slot without rows costs nothing; its
 * output is zero.
 *
 * With segments, the call's slots are these, and q and out have flat rows. Where block is 0, segment g's rows are those
 * from first_row on, length = start + count, and rows of no segment are neither read nor written. Else segment g has
 * the block rows from g * block on, which come after all of its own: length = start + (added ? added[g] : 0) + block;
 * the output of an idle one is zero.
 *
 * With row_path, a segment's rows, at most 64, are a tree: row i sees all keys before the first of them and those rows
 * whose bits are set, its ancestors and itself. It stands as many positions behind the first as it has ancestors, which
 * a window has to reach. */
typedef struct
{
    int32_t dtype; /* FP16 or BF16: q and out, and caches without scales */
    int32_t slots; /* B; with segments G */
    int32_t rows; /* Q; with segments the most that one has here, or block */
    int32_t heads;
    int32_t kv_heads;
    int32_t head_size; /* 64 or 128; on Hopper 256 and 512 too, of caches without scales */
    int32_t cache_rows; /* S */
    int32_t causal; /* 1: row i sees the keys up to its own position; 0: all */
    int32_t window; /* a row at position p sees keys > p - window; 0: no window */
    int32_t length_offset;
    int32_t sinks_dtype;
    float scale; /* of q k^T; usually 1 / sqrt(D) */
    const void* q; /* [B, Q, Hq, D] by strides; with segments [N, Hq, D], and q_slot_stride is not read */
    const void* keys; /* [B, Hkv, S, D] by strides, each head's S x D contiguous */
    const void* values;
    const int32_t* lengths; /* [B]; not read with segments */
    const int32_t* added; /* [B] or null */
    const void* sinks; /* [Hq]: a logit that takes part in the softmax and has no value; or null */
    void* out; /* [B, Q, Hq * D] contiguous; with segments [N, Hq * D] */
    int64_t q_slot_stride;
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t cache_slot_stride;
    int64_t cache_head_stride;
    const float* key_scale; /* []: caches are E4M3, and stand for their numbers times these; or both null */
    const float* value_scale;
    const int32_t* segments; /* [G, 4], or null */
    const int32_t* page_table; /* [slots, width] by stride, or null: caches are a run of rows a slot */
    int64_t page_table_stride;
    int32_t page_rows; /* with a page table */
    int32_t pages; /* of the caches; with segments or a page table, else slots */
    int32_t block; /* with segments only */
    const uint64_t* row_path; /* [N]: the rows of its segment that a row sees, or null; with causal segments only */
    int32_t is_exact; /* 1: a row's last DFLASH_EXACT_TAIL keys, and those before them as divided at multiples of
                         DFLASH_EXACT_KEYS from a slot's first on, add up apart: so its bits depend on its own keys
                         alone. On Hopper, causal segments of at most DFLASH_TREE_MOST_ROWS rows without `added`, heads
                         to 128, no window below DFLASH_EXACT_TAIL; else cudaErrorNotSupported. A row's path has at most
                         DFLASH_EXACT_TAIL rows */
} dflash_attention_params;

#define DFLASH_EXACT_KEYS 512
#define DFLASH_EXACT_TAIL 16

/* Bytes of scratch that dflash_attention needs on the current device: depends on shapes, never on lengths. */
DFLASH_API cudaError_t dflash_attention_workspace(const dflash_attention_params* params, size_t* bytes);

/* `workspace`: at least that many bytes, 16-byte aligned; its contents need not be kept. */
DFLASH_API cudaError_t dflash_attention(
    const dflash_attention_params* params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

/* The same of many rows of prompts, on Hopper (elsewhere cudaErrorNotSupported): causal, of segments of any number of
 * rows over pages without scales. `rows` is N here, the flat rows of q; `added`, `block` and `row_path` are not taken.
 * With is_exact cudaErrorNotSupported. */
DFLASH_API cudaError_t dflash_attend_prompts(const dflash_attention_params* params, cudaStream_t stream);

/* Latent attention (MLA), absorbed, on Hopper (elsewhere cudaErrorNotSupported): a cache row is the key of all heads,
 * and its first 512 numbers are the value. kv_heads is 1, head_size 576, causal 1, out [B, Q, Hq * 512]; `values` is
 * not read. Of a run of rows a slot, without segments, page table, block, row_path, window, sinks or scales. With
 * is_exact cudaErrorNotSupported. */
DFLASH_API cudaError_t dflash_latent_attention_workspace(const dflash_attention_params* params, size_t* bytes);

DFLASH_API cudaError_t dflash_latent_attention(
    const dflash_attention_params* params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

/* Latent attention's cache rows, and the rotated parts of its queries. Row i of slot b stands at start[b] + i: 512
 * numbers that are normed and 64 that RoPE rotates, number j and j + 32 together. Rows outside of the cache are
 * dropped. */
typedef struct
{
    int32_t dtype; /* FP16 or BF16 */
    int32_t slots; /* B */
    int32_t rows; /* N */
    int32_t heads;
    int32_t plain_size; /* P: numbers of a head's projected query that are not rotated, its first */
    int32_t cache_rows;
    int32_t positions; /* rows of the RoPE tables */
    float norm_eps;
    const void* q; /* [B, N, Hq, P + 64] contiguous */
    const void* kv; /* [B, N, 576] by strides */
    const void* norm; /* [512] */
    const void* cos; /* [positions, 32] */
    const void* sin;
    const int32_t* start; /* [B] */
    void* cache; /* [B, 1, S, 576] by stride */
    void* queries; /* [B, N, Hq, 576] contiguous: the last 64 numbers of each are written */
    int64_t kv_slot_stride;
    int64_t kv_row_stride;
    int64_t cache_slot_stride;
} dflash_latent_append_params;

DFLASH_API cudaError_t dflash_latent_append(const dflash_latent_append_params* params, cudaStream_t stream);

/* From projected rows to the caches: norm of heads, RoPE, append; and normed, rotated queries.
 *
 * Writes one run of rows a slot at start[b]: first the context rows (the first committed[b] of them, or all where
 * committed is null), then at once the block's rows. Keys of both are normed and rotated at their own positions. Rows
 * whose position is negative or not below cache_rows are dropped.
 *
 * With segments, context rows are flat, and of segment g the first committed[g] are written, each at its own position.
 * So are the rows of qkv where block is 0: those of no segment get zeros as queries and as rows of `out`. Else qkv has
 * block rows of each segment, which are written at start + committed[g]. Idle segments write nothing. */
typedef struct
{
    int32_t dtype;
    int32_t slots; /* B; with segments G */
    int32_t rows; /* of a slot's block; with segments N, or block; 0: none */
    int32_t context_rows; /* of a slot; with segments N; 0: none */
    int32_t heads;
    int32_t kv_heads;
    int32_t head_size;
    int32_t cache_rows;
    int32_t positions; /* rows of the RoPE tables */
    float norm_eps;
    const void* qkv; /* [B, rows, (Hq + 2 Hkv) * D] by strides: queries, keys, values; or [N, ...] */
    const void* context_k; /* [B, context_rows, Hkv * D] by strides; with segments [N, Hkv * D] */
    const void* context_v;
    const void* q_norm; /* [D], or null */
    const void* k_norm; /* [D], or null */
    const void* cos; /* [positions, D / 2] */
    const void* sin;
    const int32_t* start; /* [B]; not read with segments */
    const int32_t* committed; /* [B] or null */
    void* q_out; /* [B, rows, Hq, D] contiguous; or [N, Hq, D] */
    void* keys; /* [B, Hkv, S, D] by strides */
    void* values;
    int64_t qkv_slot_stride;
    int64_t qkv_row_stride;
    int64_t context_slot_stride;
    int64_t context_row_stride;
    int64_t cache_slot_stride;
    int64_t cache_head_stride;
    const float* key_scale; /* []: caches are E4M3: rows of `dtype` divided by these, rounded to nearest, saturated; */
    const float* value_scale; /* or both null */
    const int32_t* segments; /* [G, 4], or null */
    const int32_t* row_segment; /* [N]: each flat row's segment; -1: none */
    const int32_t* page_table; /* [slots, width] by stride, or null: caches are a run of rows a slot */
    int64_t page_table_stride;
    void* out; /* [N, Hq * D] contiguous: attention's result, in which rows of no segment become zeros */
    int32_t page_rows; /* with a page table */
    int32_t block; /* with segments only */
    const int32_t* row_position; /* [N]: the positions that flat rows are rotated by, or null: those where they lie */
    int32_t rotary_size; /* numbers of a head that RoPE rotates, its first: a multiple of 16, of heads of 512 of 32; 0:
                            D. The tables' width, twice */
    int32_t is_norm_wide; /* 1: q_norm and k_norm are FP32, and rows are rounded once, behind them */
    int32_t keys_as_values; /* 1: qkv has no values, [B, rows, (Hq + Hkv) * D]: they are its keys, as projected */
    int32_t norms_values; /* 1: values are normed, without weights */
} dflash_append_params;

DFLASH_API cudaError_t dflash_append(const dflash_append_params* params, cudaStream_t stream);

/* Append and attention of segments of one row each, in one launch, on Hopper: what dflash_append and dflash_attention
 * do of them, but q_out and q are not written and read. All of append's rows are the segments' or padding, and starts lie
 * below cache_rows; what both structures have is alike in both. Else, for FP8 caches, is_exact, keys_as_values,
 * norms_values, heads of more than 128, a rotary_size that is no multiple of 32, more than 32 segments, or more than
 * eight query heads of a KV head, cudaErrorNotSupported. Reads what the caches hold before the segments' starts,
 * segments, rows and page table without waiting for the kernel before it: dflash_embed, or one that is not ours, must
 * have been launched since they were written. */
DFLASH_API cudaError_t dflash_row_attention_workspace(
    const dflash_append_params* append, const dflash_attention_params* attention, size_t* bytes);

/* `arrivals`: DFLASH_ROW_ARRIVALS for each segment and KV head, of this stream alone; zeros, as which it leaves them. */
DFLASH_API cudaError_t dflash_row_attention(const dflash_append_params* append,
    const dflash_attention_params* attention, uint32_t* arrivals, void* workspace, size_t workspace_bytes,
    cudaStream_t stream);

#define DFLASH_ROW_ARRIVALS 16

#define DFLASH_SKINNY_ROWS 16
#define DFLASH_WIDE_ROWS 128
#define DFLASH_WIDE_FP8_ROWS 256

/* norm(x) W^T + bias + residual of few rows: bound by reading W. The sums of a row do not depend on the other rows, nor
 * on their number.
 *
 * The norm is RMSNorm: x * norm_weight, rounded, goes into the products, and their sums are multiplied by
 * 1 / sqrt(mean(x^2) + eps). The result is rounded before the bias, after it, and after the residual.
 *
 * A weight's row is a multiple of 128 bytes, and there are a multiple of 16 of them. E4M3 weights have an FP32 scale a
 * row, or one a block of 128 rows by 128 columns, and are multiplied in FP16, into which BF16 inputs go by a power of
 * two for each 128 of a row: what rounding takes from them is less than 2^-38 of the largest of the 128. */
typedef struct
{
    int32_t dtype; /* FP16 or BF16: x, norm_weight, bias, residual and out */
    int32_t weight_dtype; /* dtype, or FP8 */
    int32_t rows; /* at most DFLASH_SKINNY_ROWS */
    int32_t inputs;
    int32_t outputs;
    int32_t swiglu; /* 1: the weight's rows are gate, then up, and out is silu(gate) * up, half as wide */
    float eps; /* of the norm */
    const void* x; /* [rows, inputs] contiguous */
    const void* norm_weight; /* [inputs], or null: x as it is */
    const void* weight; /* [outputs, inputs] contiguous */
    const float* scale; /* of FP8 weights: [outputs], or by block [ceil(outputs / 128), inputs / 128] */
    const void* bias; /* [outputs], or null; as residual, at a multiple of 4 bytes, of more than 128 rows 16 */
    const void* residual; /* [rows, outputs] contiguous, or null; not with swiglu */
    void* out; /* [rows, outputs] contiguous */
    int32_t norm_adds_one; /* 1: the norm multiplies by one more than its weight; x and weight BF16 alone */
    int32_t gelu; /* 1: gates go through GELU by its form with tanh, not through SiLU; with swiglu only */
    const float* row_factors; /* [rows] that sums are multiplied by, or null; of dflash_exact_gemm, and of
                                 dflash_wide_gemm with FP8 weights */
    int32_t is_scaled_by_block; /* of FP8 weights */
    int32_t leaves_room; /* 1: with blocks small enough for dflash_row_attention's beside them; of dflash_skinny_gemm */
} dflash_skinny_gemm_params;

DFLASH_API cudaError_t dflash_skinny_gemm(const dflash_skinny_gemm_params* params, cudaStream_t stream);

/* The same of at most DFLASH_WIDE_ROWS rows, of FP8 weights with a scale a row DFLASH_WIDE_FP8_ROWS, without a norm, on
 * Hopper. A row's sums depend neither on the other rows nor on their number; their order is another than
 * dflash_skinny_gemm's.
 *
 * With FP8 weights x is E4M3, too, and row_factors its scales (dflash_quantize): [rows], or of weights that have them by
 * block [inputs / 128, rows]. Inputs are a multiple of 16, or of 128 by block, scale lies at a multiple of 8 bytes, and
 * what is left is BF16. Sums of products, by block those of 128, are as precise as the tensor cores' own. The order of a
 * row's sums may then be one of up to 64 rows and another of more (by block), or of up to 128 and of more. */
DFLASH_API cudaError_t dflash_wide_gemm(const dflash_skinny_gemm_params* params, cudaStream_t stream);

/* What the busiest of so many multiprocessors, or of those for each DFLASH_WIDE_ROWS of the rows, reads of the weight
 * then, in thousandths of an equal share. On the host: by rows, inputs, outputs, swiglu and the weight's kind alone. */
DFLASH_API int32_t dflash_wide_gemm_load(const dflash_skinny_gemm_params* params, int32_t processors);

/* The same of hundreds of rows with SwiGLU or GELU, in tiles of 256 rows, where nobody asks for one order of sums
 * whatever the number of rows. There are a multiple of 32 outputs; out lies at a multiple of 16 bytes. */
DFLASH_API cudaError_t dflash_bulk_gemm(const dflash_skinny_gemm_params* params, cudaStream_t stream);

/* Likewise, what the busiest of so many multiprocessors does then, in thousandths of an equal share. On the host. */
DFLASH_API int32_t dflash_bulk_gemm_load(const dflash_skinny_gemm_params* params, int32_t processors);

/* Bytes of device memory that dflash_exact_gemm needs for partial sums. */
DFLASH_API cudaError_t dflash_exact_gemm_workspace(const dflash_skinny_gemm_params* params, size_t* bytes);

/* The same of any number of rows, without FP8 weights, on Hopper: a row's sums go in one order, whatever number of rows
 * there is. More than DFLASH_SKINNY_ROWS have no norm, but row_factors: see dflash_norm_inputs. */
DFLASH_API cudaError_t dflash_exact_gemm(
    const dflash_skinny_gemm_params* params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

/* What dflash_exact_gemm makes of few rows and a norm, to the bit: x * weight, rounded, and 1 / sqrt(mean(x^2) + eps).
 * Products of out whose sums are multiplied by factors are those of the normed rows. H is a multiple of 64 and at most
 * 24,576. */
typedef struct
{
    int32_t dtype; /* BF16 */
    int32_t rows;
    int32_t size; /* H */
    int32_t adds_one; /* 1: x * (1 + weight) */
    int32_t outputs; /* of the product */
    float eps;
    const void* x; /* [rows, H] contiguous, as all of these */
    const void* weight; /* [H] */
    void* out; /* [rows, H] */
    float* factors; /* [rows] */
} dflash_norm_inputs_params;

DFLASH_API cudaError_t dflash_norm_inputs(const dflash_norm_inputs_params* params, cudaStream_t stream);

/* RMSNorm of x, or of x + residual, which is then stored too. H is a multiple of 8 and at most 32,768. */
typedef struct
{
    int32_t dtype;
    int32_t slots;
    int32_t rows; /* N, a slot */
    int32_t size; /* H */
    int32_t is_weight_wide; /* 1: weight is FP32, and rows are rounded once, behind it */
    int32_t parts; /* of the residual, whose sum is rounded; at most 4. 0: it is of dtype */
    float eps;
    const void* x; /* [B, N, H] by strides */
    const void* residual; /* [B, N, H] contiguous, or in FP32 [parts, B, N, H], or null */
    const void* weight; /* [H] */
    void* sum; /* [B, N, H] contiguous; with residual only */
    void* out; /* [B, N, H] contiguous */
    int64_t x_slot_stride;
    int64_t x_row_stride;
} dflash_rms_norm_params;

DFLASH_API cudaError_t dflash_rms_norm(const dflash_rms_norm_params* params, cudaStream_t stream);

/* A router: RMSNorm of x, or of x + pending, which is then stored too, and a product of the rows normed. They are
 * rounded to `out`; for the product x times the norm's weights is rounded, and sums are multiplied by the inverse root
 * mean square. A row's sums have one order, whatever rows there are. All in BF16. */
typedef struct
{
    int32_t rows; /* N, at most a million */
    int32_t size; /* H, a multiple of 32 and at most 4,096 */
    int32_t outputs; /* O */
    int32_t is_norm_wide; /* 1: the norm's weights are FP32, and rows are rounded once, behind them */
    float eps;
    const void* x; /* [N, H] contiguous, as all of these */
    const void* pending; /* [N, H], or null */
    const void* norm; /* [H] */
    const void* weight; /* [O, H] */
    const void* bias; /* [O], or null */
    void* sum; /* [N, H]; with pending only */
    void* out; /* [N, H] */
    void* logits; /* [N, O] */
} dflash_router_params;

DFLASH_API cudaError_t dflash_router(const dflash_router_params* params, cudaStream_t stream);

/* (residual + the RMSNorm of x) * factor * scale, of which each may be left out. H as in dflash_rms_norm. */
typedef struct
{
    int32_t dtype;
    int32_t rows;
    int32_t size; /* H */
    int32_t is_weight_wide; /* as in dflash_rms_norm */
    float eps;
    float scale; /* 1: none */
    const void* x; /* [rows, H] contiguous, as all of these */
    const void* weight; /* [H] */
    const void* residual; /* [rows, H], or null */
    const void* factor; /* [1] of dtype, or null */
    void* out; /* [rows, H] */
} dflash_add_normed_params;

DFLASH_API cudaError_t dflash_add_normed(const dflash_add_normed_params* params, cudaStream_t stream);

/* cap * tanh(x / cap) */
typedef struct
{
    int32_t dtype; /* any */
    float cap;
    int64_t count; /* of numbers, a multiple of 8 */
    const void* x; /* contiguous */
    void* out; /* may be x */
} dflash_cap_params;

DFLASH_API cudaError_t dflash_cap(const dflash_cap_params* params, cudaStream_t stream);

/* silu(gate) * up, or gelu(gate) * up; F is a multiple of 8. */
typedef struct
{
    int32_t dtype;
    int32_t rows;
    int32_t size; /* F */
    int32_t gelu; /* 1: GELU by its form with tanh; 0: SiLU */
    const void* x; /* [rows, 2 F] contiguous: gate, then up */
    void* out; /* [rows, F] contiguous */
} dflash_swiglu_params;

DFLASH_API cudaError_t dflash_swiglu(const dflash_swiglu_params* params, cudaStream_t stream);

/* x * sigmoid(gate), rounded, plus the residual, if any; F is a multiple of 8. */
typedef struct
{
    int32_t dtype;
    int32_t rows;
    int32_t size; /* F */
    int32_t gates_of_row; /* F, or 1 for all of a row */
    const void* x; /* [rows, F] contiguous */
    const void* gates; /* [rows, gates_of_row] by stride */
    const void* residual; /* [rows, F] contiguous, or null */
    void* out; /* [rows, F] contiguous */
    int64_t gates_row_stride;
} dflash_gate_params;

DFLASH_API cudaError_t dflash_gate(const dflash_gate_params* params, cudaStream_t stream);

/* Rows, or their RMSNorm as dflash_rms_norm rounds it, as E4M3 and a scale each, the largest magnitude / 448 (and
 * 1e-12). I is a multiple of 8 and at most 32,768; with a scale for each 128 numbers of a row, a multiple of 128. */
typedef struct
{
    int32_t dtype; /* FP16 or BF16: x */
    int32_t rows;
    int32_t size; /* I */
    int32_t by_block; /* whether each 128 numbers of a row have a scale */
    int32_t is_weight_wide; /* 1: norm_weight is FP32, and rows are rounded once, behind it */
    float eps; /* of the norm */
    const void* x; /* [rows, I] contiguous */
    const void* norm_weight; /* [I], or null: x as it is */
    uint8_t* out; /* [rows, I] contiguous */
    float* scale; /* [rows], or by block [I / 128, rows] */
} dflash_quantize_params;

DFLASH_API cudaError_t dflash_quantize(const dflash_quantize_params* params, cudaStream_t stream);

/* This rank's part of a mixture of experts' feed-forward, of so few rows that reading experts is what it costs: only
 * those that a row chose are read, once for up to 16 rows.
 *
 * A row's experts are those of its top_k largest logits, the lowest ids among equals; its shares are the softmax over
 * those, or over all, in FP32, times the expert's scale. With a correction, scores are the logits' sigmoids: chosen by
 * their sums with it, a row's shares are the scores alone, normalized divided by their sum and 1e-20. Shares are
 * multiplied by share_scale, last. Each expert computes act(x gate_up^T + bias) down^T + bias, rounded to the type
 * before the activation, after it, and at the end; these are summed in FP32 by share, in the order of the logits. The
 * experts that this rank has are first..first + count - 1.
 *
 * In MXFP4 a weight [E, O, I] is tiles, each of a granule's 16 rows (of gate and up 8 of each, the same ones) by 128
 * columns, or those that are left behind them. It is parts of 32 columns, each the numbers of the first 8 rows, [8, 16
 * bytes], two of E2M1 a byte, the even one in the low half; those of the others; and the scales [8, 2], E8M0, of the
 * first rows and the others, 128 at most. The 8 are rows 0, 2, 4, 6, 1, 3, 5 and 7. Four granules are a slab, of an
 * expert's last ones perhaps fewer: their tiles of the first columns lie together, then those of the next. Beside BF16
 * the bits of each four bytes, eight numbers, are interleaved: with number i as a pair's lower half and i + 4 as its
 * upper one, where BF16 has sign, exponent's low bits and fraction (bits 15, 8, 7 and 6), pair 0 is the word there, 1
 * the word rotated left by 10, 2 by 13; 3 has its sign at bit 3, its exponent at 1 and 0 and its fraction at 4. H and F
 * are multiples of 32 then, else of 16. Shared memory has to hold 16 rows of the wider of them, or 8, which then share
 * the reading of an expert.
 *
 * In INT4 a weight is [E, O, I / 8] int32, eight numbers from -8 to 7 each, the first in the lowest bits, stored as
 * themselves and 8, with BF16 scales [E, O, I / 32]. A number times its scale is rounded to the type, and in FP16 the
 * scale too. H and F are multiples of 256.
 *
 * In NVFP4 a weight is tiles as MXFP4's, whose 8 rows are in order and whose scales are [8, 2, 2], two of E4M3 for 32
 * numbers; and FP32 scales [E, O]. E4M3 ones have no sign and are numbers: 0x7f counts as 480. Numbers times these are
 * not rounded, and sums are scaled by the FP32 ones. H and F are multiples of 32.
 *
 * In FP8 a weight is E4M3 [E, O, I] with FP32 scales, [E, O] or [E, ceil(O / 128), ceil(I / 128)]; sums are scaled, not
 * weights. Its codes that are not numbers (0x7f, 0xff) are not told apart: they count as 480. */
#define DFLASH_MOE_MOST_ROWS 512

typedef enum
{
    DFLASH_MOE_NUMBERS = 0, /* of dtype */
    DFLASH_MOE_MXFP4 = 1,
    DFLASH_MOE_FP8_ROWS = 2, /* a scale for each row */
    DFLASH_MOE_FP8_BLOCKS = 3, /* a scale for each block of 128 by 128 */
    DFLASH_MOE_INT4 = 4, /* a scale for each 32 of a row */
    DFLASH_MOE_NVFP4 = 5 /* a scale for each 16 of a row, and one for the row */
} dflash_moe_format;

typedef struct
{
    int32_t dtype; /* FP16 or BF16: x, biases, weights that are not packed, and out */
    int32_t logits_dtype; /* any */
    int32_t format; /* dflash_moe_format of both weights */
    int32_t rows; /* N, at most DFLASH_MOE_MOST_ROWS */
    int32_t hidden; /* H */
    int32_t columns; /* F, of each expert, that this rank has */
    int32_t experts; /* on all ranks, at most 512 */
    int32_t first;
    int32_t count;
    int32_t top_k; /* at most 32, with the shared expert */
    int32_t normalized; /* 1: shares are the softmax over the top_k logits; 0: over all */
    int32_t clamped; /* 1: min(gate, limit) * sigmoid(alpha * that) * (clamp(up, -limit, limit) + 1); 0: SwiGLU */
    float alpha;
    float limit;
    const void* x; /* [N, H] contiguous, as all of these but logits and gates */
    const void* logits; /* [N, experts] by stride */
    const void* gate_up; /* [count, 2 F, H]: gate rows, then up rows; numbers, or tiles */
    const void* gate_up_scales; /* INT4's and FP8's */
    const void* gate_up_bias; /* [count, 2 F], or null */
    const void* down; /* [count, H, F] */
    const void* down_scales;
    const void* down_bias; /* [count, H], or null */
    void* out; /* [N, H] */
    const void* expert_scale; /* [experts] of dtype, by which shares are multiplied in the end, or null */
    const float* correction; /* [experts]: scores are sigmoids, chosen by their sums with these; or null: softmax */
    int32_t gelu; /* 1: gates go through GELU by its form with tanh, not through SiLU; not with clamped */
    float share_scale;
    const float* gate_up_row_scales; /* NVFP4's [count, 2 F] */
    const float* down_row_scales; /* NVFP4's [count, H] */
    const void* shared_gate; /* [N] of logits_dtype by stride: the shared expert's share is its sigmoid; or null: 1 */
    const void* residual; /* [N, H], added to out; or null */
    int32_t has_shared; /* 1: weights, scales and biases have one more expert, the last, which all rows go through */
    int32_t logits_row_stride;
    int32_t shared_gate_row_stride;
    const int32_t* row_segment; /* [N], or null: rows below 0 are nobody's, and choose no expert: 0, and the residual */
} dflash_moe_params;

/* Bytes of scratch that dflash_moe needs. */
DFLASH_API cudaError_t dflash_moe_workspace(const dflash_moe_params* params, size_t* bytes);

/* `workspace`: at least that many bytes, 16-byte aligned; its contents need not be kept. */
DFLASH_API cudaError_t dflash_moe(
    const dflash_moe_params* params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

/* The same for many rows, of all but INT4, on Hopper: an expert is read once for up to 64 of the rows that chose it.
 * Both are cudaErrorNotSupported on other GPUs. */
DFLASH_API cudaError_t dflash_moe_many_workspace(const dflash_moe_params* params, size_t* bytes);

DFLASH_API cudaError_t dflash_moe_many(
    const dflash_moe_params* params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

/* The largest logit of each row and its id, the lowest among equals. */
typedef struct
{
    int32_t dtype; /* of logits: any */
    int32_t rows;
    int32_t size; /* V */
    const void* logits; /* [rows, V] by stride */
    int32_t* ids; /* [rows] */
    float* best; /* [rows] or null */
    int64_t row_stride;
    const float* shaped; /* [rows, size] contiguous: rows in place of those, or null */
    const int32_t* is_shaped; /* [rows]: 0: it is not; null: none is */
} dflash_argmax_params;

DFLASH_API cudaError_t dflash_argmax(const dflash_argmax_params* params, cudaStream_t stream);

/* Log-probabilities of each row's token, and of its likeliest ones: x - log(sum(exp(x))), in FP32. Of equals the lower
 * token comes first. */
typedef struct
{
    int32_t dtype; /* FP16, BF16 or FP32: logits */
    int32_t rows;
    int32_t size; /* V */
    int32_t top_count; /* at most V and 32 */
    const void* logits; /* [rows, V] contiguous, as all of these */
    const int32_t* ids; /* [rows] */
    float* chosen; /* [rows] */
    int32_t* top_ids; /* [rows, top_count] */
    float* top; /* [rows, top_count] */
    const int32_t* wanted; /* [1] or null; 0: nothing is computed */
} dflash_log_probabilities_params;

DFLASH_API cudaError_t dflash_log_probabilities(const dflash_log_probabilities_params* params, cudaStream_t stream);

/* Shapes the logits of a step's flat rows before tokens are chosen: by the penalties of the rows' slots, whose replies
 * go on with the rows of the step up to each row's own, and then by masks of rows.
 *
 * x <- x / repetition or x * repetition, of tokens that the prompt or the reply has, by the sign of x;
 * x <- x - count * frequency - presence (of tokens that the reply has) + bias;
 * x <- -1e30 of end tokens while position + 1 < ends_from, and of each run's last token behind the run's others;
 * x <- -infinity of tokens that the row's mask has not. */
typedef struct
{
    int32_t dtype; /* FP16, BF16 or FP32: logits */
    int32_t rows; /* R */
    int32_t size; /* this rank's tokens */
    int32_t first_token; /* of these */
    int32_t vocabulary; /* V, of all ranks together */
    int32_t segment_count; /* G */
    int32_t decode_segments; /* D */
    int32_t run_count; /* W, at most 64 */
    int32_t run_length; /* L, at most 8 */
    int32_t mask_words; /* 32-bit words of a mask, at least V / 32 */
    const void* logits; /* [R, size] contiguous, as all of these */
    float* shaped; /* [R, size] */
    const int32_t* decoding; /* [D, 4], as these of dflash_begin_rows: other segments' rows belong to no reply */
    const int32_t* logit_first; /* [G + 1] */
    const int32_t* row_segment; /* [N] */
    const int32_t* token_ids; /* [N] */
    const int32_t* logit_rows; /* [R] */
    const int32_t* logit_slot; /* [R] */
    const int32_t* logit_position; /* [R] */
    const uint32_t* masks; /* [M, mask_words]: a bit for each token, the lowest first */
    const int32_t* mask_rows; /* [R]: which of the masks; -1: none */
    const int32_t* penalized; /* [slots]: 0: the slot has no penalties, and nothing of it is read below */
    const float* presence; /* [slots] */
    const float* frequency; /* [slots] */
    const float* repetition; /* [slots] */
    const int32_t* counts; /* [slots, V]: how often the reply has a token, before the step's rows */
    const uint8_t* in_prompt; /* [slots, V]: 0 or 1 */
    const float* bias; /* [slots, V] */
    const uint8_t* ends; /* [slots, V]: 0 or 1 */
    const int32_t* ends_from; /* [slots]: the first position that an end token may stand at */
    const int32_t* runs; /* [slots, W, L] of tokens; -1 before short ones, and in place of none: any token */
    const int32_t* recent; /* [slots, L - 1]: the reply's last tokens before the step's rows; -2 before the first */
    int32_t* is_shaped; /* [R] or null: all rows are written. 0: the row changes in nothing, and is not written */
} dflash_shape_logits_params;

DFLASH_API cudaError_t dflash_shape_logits(const dflash_shape_logits_params* params, cudaStream_t stream);

/* Adds the tokens that a step has made final to the replies of slots with penalties: of each decode segment the first
 * accepted + 1 rows. Idle segments and pieces of prompts add none. */
typedef struct
{
    int32_t decode_segments; /* D */
    int32_t vocabulary; /* V */
    int32_t run_length; /* L, at most 8 */
    const int32_t* decoding; /* [D, 4] contiguous, as all of these */
    const int32_t* token_ids; /* [N] */
    const int32_t* accepted; /* [>= D] */
    const int32_t* penalized; /* [slots] */
    int32_t* counts; /* [slots, V] */
    int32_t* recent; /* [slots, L - 1] */
} dflash_keep_replies_params;

DFLASH_API cudaError_t dflash_keep_replies(const dflash_keep_replies_params* params, cudaStream_t stream);

/* What a verify pass decided: compares each draft of a segment with the target's choice one row before it.
 *
 * A segment's logits are those of its last rows. Committed are its rows up to the last accepted draft. An idle one gets
 * zeros. */
typedef struct
{
    int32_t segment_count; /* G */
    const int32_t* segments; /* [G, 4] contiguous, as all of these */
    const int32_t* logit_first; /* [G + 1]: each segment's first logit, and their number */
    const int32_t* token_ids; /* [N] */
    const int32_t* target_ids; /* [R] */
    int32_t* accepted; /* [G] */
    int32_t* committed; /* [G] */
    int32_t* bonus; /* [G] */
    int32_t* next_start; /* [G]: start + committed */
} dflash_accept_params;

DFLASH_API cudaError_t dflash_accept(const dflash_accept_params* params, cudaStream_t stream);

/* What a verify pass decided where drafts are trees: compares each row's token with the target's choice at its parent.
 *
 * The accepted rows of a segment are the deepest path from its first row on which all are equal. Rows of a prompt's
 * piece are in their places in any case; others have at most 64. An idle segment gets zeros. A row's rank is its place
 * among its siblings, which come in the order of their chances.
 *
 * In the same launch, rows go where they belong: the taps of final rows are joined at their positions in their segment,
 * and the K and V of accepted ones are moved to theirs in all caches: row d of a path goes to the segment's start + d.
 * Pages of all caches have as many rows, at least 64 where a slot has several; those of some may be other pages. */
#define DFLASH_MOST_JOINED 8

typedef struct
{
    int32_t segment_count; /* G */
    int32_t decode_segments; /* D: of the first ones, K and V are moved */
    int32_t rows; /* N */
    int32_t logit_row_count; /* R */
    int32_t tap_count; /* T, at most DFLASH_MOST_JOINED; 0: none are joined */
    int32_t size; /* H, a multiple of 8 */
    int32_t cache_count; /* C; 0: none are moved */
    int32_t page_rows;
    int32_t most_bytes; /* of all heads' rows at one position, of any cache */
    const int32_t* segments; /* [G, 4] contiguous, as all of these but the page tables */
    const int32_t* logit_first; /* [G + 1] */
    const int32_t* row_segment; /* [N]; -1: padding, which stays where it is */
    const int32_t* token_ids; /* [N] */
    const int32_t* target_ids; /* [R] */
    const uint64_t* row_path; /* [N]: of a segment's rows, each one's ancestors and itself */
    const int32_t* imposed; /* [G]: how many drafts are accepted, whatever they are, without ranks; or null */
    int32_t* accepted; /* [G] */
    int32_t* committed; /* [G] */
    int32_t* bonus; /* [G] */
    int32_t* next_start; /* [G] */
    uint64_t* path; /* [G]: the accepted rows */
    int32_t* choices; /* [R]: the target's at a segment's accepted rows first, then any */
    int32_t* ranks; /* [R]: 0 for a segment's first row, its accepted drafts' ranks from 1, then zeros; or null */
    void* joined; /* [N, T * H] of 16 bits: at a final row's position in its segment its taps, elsewhere any row's */
    const int64_t* caches; /* [C, 4]: a cache's address, heads, bytes of a row, a multiple of 16, and 1 if its pages are
                              those of window_table */
    const int32_t* page_table; /* [slots, width] by stride */
    const int32_t* window_table;
    int64_t page_table_stride;
    int64_t window_table_stride;
    const void* taps[DFLASH_MOST_JOINED]; /* [N, H] each */
} dflash_accept_tree_params;

DFLASH_API cudaError_t dflash_accept_tree(const dflash_accept_tree_params* params, cudaStream_t stream);

/* Each row's largest logits, the lowest ids among equals first, and the log of the sum of all logits' exponentials. */
#define DFLASH_TOP_COUNT 8

typedef struct
{
    int32_t dtype; /* of logits: any */
    int32_t rows;
    int32_t size; /* V, at least DFLASH_TOP_COUNT */
    int32_t normalized; /* 1: of the best their log-probabilities are given; 0: the logits */
    const void* logits; /* [rows, V] by stride */
    int32_t* ids; /* [rows, DFLASH_TOP_COUNT] */
    float* best; /* [rows, DFLASH_TOP_COUNT] */
    float* total; /* [rows] */
    int64_t row_stride;
} dflash_top_ids_params;

DFLASH_API cudaError_t dflash_top_ids(const dflash_top_ids_params* params, cudaStream_t stream);

/* The best tree of each slot, out of a list of nodes in which parents come first: the `nodes` of the largest sums of
 * log-probabilities down from the root, in the list's order.
 *
 * Log-probabilities below `least` count as it, and `toll` is taken off for each depth, so that no node scores as much
 * as its parent. */
#define DFLASH_TREE_MOST_LISTED 1024
#define DFLASH_TREE_MOST_PLACES 512

typedef struct
{
    int32_t slots; /* B */
    int32_t nodes; /* of a tree: a row less than its most */
    int32_t listed;
    int32_t places; /* depths * DFLASH_TOP_COUNT, at most DFLASH_TREE_MOST_PLACES */
    float least;
    float toll;
    const int32_t* list_parents; /* [listed] contiguous, as all of these; -1: the root */
    const int32_t* list_places; /* [listed]: (depth - 1) * DFLASH_TOP_COUNT + rank */
    const int32_t* bonus; /* [B] */
    const float* log_probs; /* [B, places] */
    const int32_t* ids; /* [B, places] */
    int32_t* tokens; /* [B, nodes + 1]: the bonus token, then the nodes' */
    int32_t* parents; /* [B, nodes + 1]: rows; -1, then those of the nodes' parents */
} dflash_grow_tree_params;

DFLASH_API cudaError_t dflash_grow_tree(const dflash_grow_tree_params* params, cudaStream_t stream);

/* The flat rows of a step, and their logits, from what the host wrote and what each slot kept.
 *
 * Rows and logits lie tight, in the order of segments: first decode segments, whose tokens are their slots' kept ones,
 * then pieces of prompts, whose tokens the host gives. How many of either there are, the words say: a piece is a
 * segment that has rows and a start. A segment's logits are those of its last rows. What is past the last row, logit or
 * cut is padding.
 *
 * The number of the token that a logit chooses, in [0, 1) on a grid of 2^-24, is the first word of Philox4x32-10
 * without its last 8 bits: the key is the slot's seed, the counter the token's position, one after the row's.
 *
 * With parents, the kept tokens are trees: a decode segment's rows, at most 64, stand as many positions behind its
 * start as they have ancestors. */
typedef struct
{
    int32_t segment_count; /* G */
    int32_t decode_segments; /* D, places in their list, at most G, as for the next */
    int32_t piece_count; /* P */
    int32_t rows; /* N */
    int32_t logit_row_count; /* R */
    int32_t cut_count;
    int32_t cut_rows; /* of a cut, at most */
    int32_t block; /* rows of kept tokens, of which a decode segment takes its count */
    const int32_t* words; /* [4 G]: of each segment slot, count, start (-1: it decodes), logits; then pieces' tokens */
    const int32_t* tokens; /* [slots, block] contiguous, as all of these */
    const int32_t* kept_start; /* [slots] */
    int32_t* segments; /* [G, 4] */
    int32_t* decoding; /* [D, 4]: the first D segments; those that are pieces are idle, all zeros */
    int32_t* pieces; /* [P, 4]: the first P pieces; past the last one idle */
    int32_t* row_segment; /* [N]; padding: -1 */
    int32_t* token_ids; /* [N]; padding: 0, as in what follows */
    int32_t* logit_first; /* [G + 1]: each segment's first logit, and their number */
    int32_t* logit_rows; /* [R]: the flat row of each logit */
    int32_t* logit_slot; /* [R] */
    int32_t* logit_position; /* [R]: the row's own */
    int32_t* cuts; /* [cut_count, 4]: the pieces as segments of at most cut_rows rows */
    const int64_t* seeds; /* [slots], or null: no numbers */
    float* logit_uniform; /* [R]; padding: of slot 0 and position 0; with seeds only */
    const int32_t* parents; /* [slots, block]: the row of each kept token's parent, a lower one; or null */
    int32_t* row_position; /* [N]; with parents only, as the next */
    uint64_t* row_path; /* [N]: of its segment's rows a row's ancestors and itself; of pieces and padding 0 */
} dflash_begin_rows_params;

DFLASH_API cudaError_t dflash_begin_rows(const dflash_begin_rows_params* params, cudaStream_t stream);

/* Rows by survival: divides the rows that a step's decoding slots share, before dflash_begin_rows reads its words.
 *
 * A draft's chance is what was foretold of it, times how many drafts of its position survived of those expected to, and
 * no more than the chance of the draft before it. Each decoding slot gets a row for its bonus token; the others go to
 * the largest chances, of equal ones to the earlier position, then to the earlier segment. A chance of 0 gets none.
 * At most 4,096 drafts of all segments together, here and below. */
typedef struct
{
    int32_t decode_segments; /* D */
    int32_t drafts; /* of a slot, at most */
    int32_t most; /* rows that the decoding slots have together */
    int32_t word_count;
    const int32_t* words; /* as of dflash_begin_rows, but of each decoding slot the most rows that it may have, and in
                             place of its logits the rows that all share */
    const float* foretold; /* [slots, drafts] contiguous, as all of these; the sign is of no matter */
    const float* expected; /* [drafts] */
    const float* survived; /* [drafts] */
    int32_t* divided; /* [word_count]: the words, with the rows that each gets */
} dflash_divide_rows_params;

DFLASH_API cudaError_t dflash_divide_rows(const dflash_divide_rows_params* params, cudaStream_t stream);

/* Divides the rows of the blocks that a step drafts: each segment that has rows gets one for its bonus token and one
 * draft; the others go to the largest chances, exp(outlook * (draft + 1)). Segments that do not decode have an outlook
 * as slots have in the beginning. */
typedef struct
{
    int32_t segment_count; /* G */
    int32_t decode_segments; /* D */
    int32_t drafts; /* of a slot, at most */
    int32_t rows; /* M, that all blocks share, at least 2 G */
    int32_t mask_id;
    const int32_t* segments; /* [G, 4] contiguous, as all of these */
    const int32_t* decoding; /* [D, 4] */
    const int32_t* next_start; /* [G] */
    const int32_t* bonus; /* [G] */
    const float* outlook; /* [slots]: mean log-probability of a draft, the ones before it being right */
    int32_t* words; /* [4 G + M]: of each segment slot, rows, next start, rows; then the rows' tokens */
    float* gains; /* [drafts]: what one more draft a slot, on average, is likely to commit, after so many */
} dflash_divide_blocks_params;

DFLASH_API cudaError_t dflash_divide_blocks(const dflash_divide_blocks_params* params, cudaStream_t stream);

/* Keeps the drafts of such blocks, what is foretold of them, and what a step's acceptance taught. */
typedef struct
{
    int32_t segment_count; /* G */
    int32_t decode_segments; /* D */
    int32_t drafts; /* of a slot, at most */
    int32_t id_stride; /* from one row's to the next one's */
    int32_t log_prob_stride;
    float memory; /* drafts at a position that are remembered: about so many, the recent ones more */
    const int32_t* decoding; /* [D, 4] contiguous, as all of these */
    const int32_t* accepted; /* [G] drafts */
    const int32_t* blocks; /* [G, 4]: slot, start, first row, count of each segment's block */
    const int32_t* bonus; /* [G] */
    const int32_t* ids; /* [M] by stride: each row's likeliest token */
    const float* log_probs; /* [M] by stride: theirs */
    float* foretold; /* [slots, drafts]: product of the probabilities down to each draft; 0: it is not drafted. Negative
                        numbers teach nothing */
    float* outlook; /* [slots] */
    float* expected; /* [drafts] */
    float* survived; /* [drafts] */
    int32_t* next_tokens; /* [G, 1 + drafts]: the bonus token and drafts, then zeros */
} dflash_keep_drafts_params;

DFLASH_API cudaError_t dflash_keep_drafts(const dflash_keep_drafts_params* params, cudaStream_t stream);

/* What each slot that has rows keeps for the next step, and what the host reads. */
typedef struct
{
    int32_t segment_count; /* G */
    int32_t block;
    int32_t width; /* logits of a segment, at most */
    int32_t next_rows; /* of next_tokens, at most block */
    int32_t last_start; /* the largest that is kept */
    int32_t depths; /* ranks of a segment that the host reads; 0: none */
    const int32_t* segments; /* [G, 4] contiguous, as all of these */
    const int32_t* logit_first; /* [G + 1] */
    const int32_t* target_ids; /* [R] */
    const int32_t* ranks; /* [R], as dflash_accept_tree has them; with depths only */
    const int32_t* accepted; /* [G] */
    const int32_t* next_start; /* [G] */
    const int32_t* next_tokens; /* [G, next_rows] */
    int32_t* tokens; /* [slots, block] */
    int32_t* kept_start; /* [slots] */
    int32_t* decided; /* [G, 1 + width + depths]: accepted, then target_ids, then the drafts' ranks; zeros past a
                         segment's logits */
    const int32_t* next_parents; /* [G, next_rows], or null: each token is the child of the one before */
    int32_t* parents; /* [slots, block], or null: not kept */
} dflash_end_rows_params;

DFLASH_API cudaError_t dflash_end_rows(const dflash_end_rows_params* params, cudaStream_t stream);

/* Copies a few words to the host's pinned memory, which the device addresses as the host does. By a kernel of a block: a
   copy by the device's engine waits for the kernels before it, and those after it for the copy. */
typedef struct
{
    int32_t count;
    const int32_t* numbers;
    int32_t* host;
} dflash_send_params;

DFLASH_API cudaError_t dflash_send(const dflash_send_params* params, cudaStream_t stream);

/* Gives slots pages: page_table[slot, index] = page. No entry is named twice. */
typedef struct
{
    int32_t count;
    const int32_t* updates; /* [count, 3] contiguous: slot, index, page */
    int32_t* page_table; /* [slots, width] by stride */
    int64_t page_table_stride;
} dflash_set_pages_params;

DFLASH_API cudaError_t dflash_set_pages(const dflash_set_pages_params* params, cudaStream_t stream);

/* Copies the first rows of a page, of every head, to another page of the same cache, in all caches. */
typedef struct
{
    int32_t cache_count; /* C */
    int32_t page_rows;
    int32_t source;
    int32_t target;
    int32_t rows; /* at most page_rows */
    const int64_t* caches; /* [C, 3] contiguous: a cache's address, heads and bytes of a row, a multiple of 16 */
} dflash_copy_pages_params;

DFLASH_API cudaError_t dflash_copy_pages(const dflash_copy_pages_params* params, cudaStream_t stream);

/* Rows of a table by id; zeros for an id that it does not have. H is a multiple of 8. */
typedef struct
{
    int32_t dtype; /* FP16 or BF16 */
    int32_t rows;
    int32_t size; /* H */
    int32_t vocabulary; /* rows of the table */
    int32_t block; /* 0: each row has its id; else the first of each so many has one, and the others have mask_id */
    int32_t mask_id;
    const void* table; /* [V, H] contiguous */
    const int32_t* ids; /* [rows], or [rows / block] */
    void* out; /* [rows, H] contiguous */
} dflash_embed_params;

DFLASH_API cudaError_t dflash_embed(const dflash_embed_params* params, cudaStream_t stream);

/* A gated delta net (arXiv 2412.06464) of flat rows: convolution, gates, the state that it keeps of each slot, and the
 * gated norm of what rows read out of it.
 *
 * Nothing is rolled back. Before its rows a state absorbs those that its last step left beside it ("pending"), as many
 * as start is past lengths; of its own rows it absorbs all but the last `pending`, and these stay beside it. One that
 * starts at 0, or stands there, is zero whatever lies in memory. lengths is not written: many nets read it, and
 * dflash_advance_states comes after them all. Segments without rows change nothing; no slot has two.
 *
 * A step of single rows need not write the states: with `keeps`, a segment's only row joins those that were accepted,
 * and nothing is absorbed, while that makes no more than `keeps`.
 *
 * C is (2 Hk + Hv) * D: of each row queries, keys, values, then, past the C channels, output gates. */
typedef struct
{
    int32_t dtype; /* FP16, BF16 or FP32: x, gates, conv, window, out */
    int32_t segment_count; /* G */
    int32_t rows; /* N: those behind a segment's, up to the next one's, get zeros */
    int32_t key_heads; /* Hk */
    int32_t value_heads; /* Hv, a multiple of Hk */
    int32_t head_size; /* D, of keys and values: 16, 32, 64 or 128 */
    int32_t kernel; /* rows that the convolution sees: 4 */
    int32_t pending; /* at most 16 */
    int32_t slots;
    int32_t most_rows; /* no segment has more */
    int32_t keeps; /* at most `pending`; 0 but for heads of 128 and no more rows than segments */
    float norm_eps;
    const int32_t* segments; /* [G, 4] in the order of their rows, the first of which is row 0 */
    const int32_t* lengths; /* [slots]: the position that a slot's states stand at */
    const void* x; /* [N, C + Hv * D] by stride */
    const void* gates; /* [N, 2 Hv] by stride: shares b, then decays a */
    const void* conv; /* [C, kernel] contiguous */
    const void* a_log; /* [Hv] FP32, as dt_bias */
    const void* dt_bias;
    const void* norm; /* [D] FP32 */
    void* states; /* [slots, Hv, D values, D keys] FP32, contiguous as all of these */
    void* writes; /* [slots, pending, Hv, D] FP32 */
    void* keys; /* [slots, pending, Hk, D] FP32 */
    void* decays; /* [slots, pending, Hv] FP32 */
    void* window; /* [slots, kernel - 1 + pending, C] */
    int32_t* counters; /* [slots, Hk]: zeros, which the kernel leaves so */
    void* out; /* [N, Hv * D] contiguous */
    int64_t x_row_stride;
    int64_t gates_row_stride;
} dflash_delta_net_params;

/* Bytes of scratch that dflash_delta_net needs, by all sizes in front of `segments`: none for steps of single rows of
 * heads of 128. */
DFLASH_API cudaError_t dflash_delta_net_workspace(const dflash_delta_net_params* params, size_t* bytes);

/* `workspace`: at least that many bytes, 16-byte aligned; its contents need not be kept. */
DFLASH_API cudaError_t dflash_delta_net(
    const dflash_delta_net_params* params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

/* Notes where the states of the slots that have rows stand, after all nets of a step. */
typedef struct
{
    int32_t segment_count;
    int32_t pending;
    int32_t keeps; /* that the nets had */
    const int32_t* segments; /* [G, 4] */
    int32_t* lengths; /* [slots] */
} dflash_advance_states_params;

DFLASH_API cudaError_t dflash_advance_states(const dflash_advance_states_params* params, cudaStream_t stream);

/* The sum of x over ranks whose GPUs read each other's memory, small enough that latency is what it costs: every rank
 * reads all ranks' x and sums in FP32 in the order of ranks, so that all get the same. All ranks must make the same
 * calls in one order; each waits for the others on the device. */
#define DFLASH_ALL_REDUCE_MOST_RANKS 8
#define DFLASH_ALL_REDUCE_MOST_BYTES 1048576 /* of x */
#define DFLASH_ALL_REDUCE_SHARED_BYTES (2 * DFLASH_ALL_REDUCE_MOST_BYTES + 4096)

typedef struct
{
    int32_t dtype; /* any */
    int32_t ranks; /* 2, 4 or 8 */
    int32_t rank; /* this one */
    int64_t count; /* of numbers; their bytes are a multiple of 16 */
    const void* x;
    void* out; /* may be x */
    /* Each rank's shared memory as this rank sees it, DFLASH_ALL_REDUCE_SHARED_BYTES each: zeros before the first call,
     * and then for these calls alone. */
    void* shared[DFLASH_ALL_REDUCE_MOST_RANKS];
} dflash_all_reduce_params;

DFLASH_API cudaError_t dflash_all_reduce(const dflash_all_reduce_params* params, cudaStream_t stream);

/* For loaders: what this library was built as. */
DFLASH_API int32_t dflash_abi_version(void);
DFLASH_API const char* dflash_architectures(void); /* as CMake names them: 90a-real,100-real,120 */
DFLASH_API const char* dflash_error_string(int32_t error);

#ifdef __cplusplus
}
#endif

#endif
