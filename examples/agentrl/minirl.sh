#!/bin/bash
# As AgentRL's minirl_example.sh: one node, eight GPUs, a 4B model. `agentevo config from-agentrl`
# reads it; docs/coming_from.md says what becomes of each flag.
RUN_NAME="$1"

accelerate launch \
    --config_file assets/fsdp2_dst.yml \
    --num_processes=8 \
    src/main.py \
    --model_name_or_path "Qwen/Qwen3-4B-Thinking-2507" \
    --trainer "QwenTrainer" \
    --loss_calculater "MINIRL" \
    --token_level_loss false \
    --strict_in_bound true \
    --skip_length_normalization true \
    --max_steps 1000 \
    --learning_rate 2e-6 \
    --warmup_steps 10 \
    --lr_scheduler_type "cosine" \
    --weight_decay 0.05 \
    --optim_args 'beta1=0.9,beta2=0.98' \
    --max_grad_norm 1.0 \
    --bf16 \
    --tp_size 4 \
    --gradient_accumulation_steps 48 \
    --per_device_train_batch_size 1 \
    --train_file "tasks.jsonl" \
    --eval_strategy "no" \
    --seed 42 \
    --run_name $RUN_NAME \
    --save_steps 3 \
    --agent_config_path "agent_config.yml" \
    --mcp_manager_url "http://127.0.0.1:8014/mcpapi" \
    --db_connection_string "mongodb://trainer:secret@127.0.0.1:27017/$RUN_NAME?authSource=admin" \
    --max_new_tokens 32768 \
    --max_prompt_tokens 128768 \
    --new_context discard_all_tools \
    --num_generations 8 \
    --preferred_sampling_params '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}' \
    --presence_penalty 0.0 \
    --max_turns 100 \
    --repetition_early_stop_times 4 \
    --output_dir output/$RUN_NAME \
    > logs/${RUN_NAME}.log 2>&1
