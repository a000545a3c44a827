// tokens prompt|generation BACKENDS MODEL: prints the tokens per second of llama.cpp on one thread. BACKENDS is
// a folder with one CPU backend, or several of which llama.cpp takes the best for this CPU.
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "ggml-backend.h"
#include "llama.h"

enum { PROMPT = 64, GENERATED = 16 };

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

// Decodes PROMPT tokens in one batch, or GENERATED tokens one by one; returns how many, 0 where that failed.
static int decode(struct llama_context *context, int vocabulary, int generate) {
    llama_token tokens[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        tokens[i] = i * 7919 % vocabulary;
    llama_memory_clear(llama_get_memory(context), true);
    if (!generate)
        return llama_decode(context, llama_batch_get_one(tokens, PROMPT)) ? 0 : PROMPT;
    for (int i = 0; i < GENERATED; i++)
        if (llama_decode(context, llama_batch_get_one(tokens + i, 1)))
            return 0;
    return GENERATED;
}

int main(int count, char **words) {
    if (count != 4)
        return 1;
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(words[2]);
    struct llama_model_params model_options = llama_model_default_params();
    model_options.n_gpu_layers = 0;
    struct llama_model *model = llama_model_load_from_file(words[3], model_options);
    if (!model)
        return 1;
    struct llama_context_params options = llama_context_default_params();
    options.n_ctx = 256;
    options.n_threads = options.n_threads_batch = 1;
    struct llama_context *context = llama_init_from_model(model, options);
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    int generate = strcmp(words[1], "generation") == 0;
    if (!context || !decode(context, vocabulary, generate))
        return 1;
    double start = seconds(), taken;
    int tokens = 0;
    do {
        int more = decode(context, vocabulary, generate);
        if (!more)
            return 1;
        tokens += more;
        taken = seconds() - start;
    } while (taken < 1);
    printf("%.3f\n", tokens / taken);
    return 0;
}
