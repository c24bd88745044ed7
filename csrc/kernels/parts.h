// The functions of one instruction set that the tables of kernels.h hold. Each .cpp in the folders beside this file compiles
// some of them: float/, byte/ and pair/ are the groups of kernels.h, pair_codes/ is what sets with products of pairs of
// bfloat16 have besides.
#pragma once

#include "kernels/kernels.h"

namespace quire::QUIRE_ISA {

using AttentionWorkspace = size_t(const AttentionLimits&);

// float/
Linear float32_product, float16_product, int8_product, int4_product, blocks_product;
Attend attention_f32;
AttentionWorkspace attention_workspace_f32;
void products(const ProductTask* tasks, const int* ends, int groups, ThreadPool&);
void finish(const FinishArgs&, ThreadPool&);
void best(const BestArgs&, ThreadPool&);
void norm(const NormArgs&, ThreadPool&);
void embed(const EmbedArgs&, ThreadPool&);
void rope(const RopeArgs&, ThreadPool&);
void store_kv(const StoreKVArgs&, ThreadPool&);
void store_latent(const StoreLatentArgs&, ThreadPool&);
void store_keys(const StoreKeysArgs&, ThreadPool&);
void choose(const ChooseArgs&, ThreadPool&);
size_t choose_workspace(int tokens, int num_heads, int groups, int head_dim, int top_k, int threads);
void add(const AddArgs&, ThreadPool&);
void scale(const ScaleArgs&, ThreadPool&);
void convolve(const ConvolveArgs&, ThreadPool&);
void scan(const ScanArgs&, ThreadPool&);
void selective_scan(const SelectiveArgs&, ThreadPool&);
void gated_recurrence(const GatedArgs&, ThreadPool&);
void unpack_block_panel(const MatrixView&, int panel, float* const (&rows)[16]);
extern const SamplerKernels sampler_kernels;

// byte/: activations are rounded to int8.
Linear int8_product_i8, int4_product_i8, blocks_product_i8;
size_t linear_workspace_i8(const MatrixView& weight, int max_rows);
size_t blocks_workspace_i8(const MatrixView& weight, int max_rows);
Attend attention_i8;
AttentionWorkspace attention_workspace_i8;

// pair/
Linear bfloat16_product, bfloat16_12_product;
size_t linear_workspace_float(const MatrixView& weight, int max_rows);
Attend attention_bf16;
AttentionWorkspace attention_workspace_bf16;
bool screened_best(const LinearArgs&, Linear* screen_product, int32_t* best, ThreadPool&);
ScreenWeightRow screen_weight_row(const float* x, int n, char* bytes);

// pair_codes/
Linear int4_product_bf16, blocks_product_bf16;
bool multiplies_pairs(const MatrixView& blocks);

}  // namespace quire::QUIRE_ISA
