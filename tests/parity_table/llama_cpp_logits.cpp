// Writes llama.cpp's logits of every token to the standard output, float32 [tokens, vocab_size].
// Usage: llama_cpp_logits MODEL CONTEXT_LENGTH [CHOICES] < token ids
// CHOICES gets the experts of every token, int32 [mixtures, tokens, experts per token].
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "llama.h"

// Writes the choices of a mixture, when the graph has computed them.
static bool on_tensor(ggml_tensor * tensor, bool asks, void * file) {
    if (std::strncmp(tensor->name, "ffn_moe_topk-", 13)) return !asks;
    if (asks) return true;
    for (int64_t token = 0; token < tensor->ne[1]; ++token)
        for (int64_t slot = 0; slot < tensor->ne[0]; ++slot)
            std::fwrite((char *) tensor->data + token * tensor->nb[1] + slot * tensor->nb[0], 4, 1, (FILE *) file);
    return true;
}

int main(int count, char ** arguments) {
    if (count != 3 && count != 4) return 2;
    std::vector<llama_token> ids;
    for (llama_token id; std::cin >> id;) ids.push_back(id);

    llama_model * model = llama_model_load_from_file(arguments[1], llama_model_default_params());
    if (!model) return 3;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = std::atoi(arguments[2]);
    params.n_batch = params.n_ubatch = ids.size();
    params.n_threads = params.n_threads_batch = 2;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    FILE * choices = count == 4 ? std::fopen(arguments[3], "wb") : nullptr;
    if (choices) {
        params.cb_eval = on_tensor;
        params.cb_eval_user_data = choices;
    }
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 4;

    llama_batch batch = llama_batch_init(ids.size(), 0, 1);
    for (size_t i = 0; i < ids.size(); ++i) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = true;
    }
    batch.n_tokens = ids.size();
    if (llama_decode(context, batch)) return 5;
    if (choices) std::fclose(choices);
    const int vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (size_t i = 0; i < ids.size(); ++i)
        std::fwrite(llama_get_logits_ith(context, i), sizeof(float), vocab_size, stdout);
    return 0;
}
