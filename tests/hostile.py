"""Variables of a user's shell that a rank must not see."""

# What a shell may hold, each with a value that changes what torch, transformers and Python do, or breaks them.
HOSTILE = {
    # Python itself
    "PYTHONOPTIMIZE": "1", "PYTHONPATH": "/nowhere", "PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1",
    "PYTHONINSPECT": "1", "PYTHONSTARTUP": "/nowhere.py", "PYTHONHASHSEED": "0", "PYTHONMALLOC": "debug",
    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "ascii", "PYTHONNOUSERSITE": "1", "PYTHONHOME": "/nowhere",
    "PYTHONTRACEMALLOC": "1", "PYTHONBREAKPOINT": "0", "PYTHONCOERCECLOCALE": "0",
    # transformers and the hub
    "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_OFFLINE": "0", "TRANSFORMERS_CACHE": "/nowhere",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HOME": "/nowhere", "HF_TOKEN": "secret", "HF_ENDPOINT": "http://x",
    "HF_HUB_OFFLINE": "0", "HF_MODULES_CACHE": "/nowhere", "HF_DEBUG": "1", "USE_TORCH": "0", "USE_TF": "1",
    "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
    # torch
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_LOGS": "+all", "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TORCH_NN_MODULE_BUFFER": "1", "PYTORCH_JIT": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "DNNL_VERBOSE": "1", "MKL_NUM_THREADS": "7",
    "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "7", "OMP_PLACES": "cores", "KMP_AFFINITY": "disabled",
    "NVIDIA_TF32_OVERRIDE": "0", "CUDA_LAUNCH_BLOCKING": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "nowhere0", "TP_SOCKET_IFNAME": "nowhere0", "LD_PRELOAD": "/nowhere.so",
    # launchers and their libraries
    "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "5", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "3", "SLURM_NTASKS": "9", "OMPI_COMM_WORLD_RANK": "3",
    "ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_BYPASS_DEVICE_MAP": "true",
    "FSDP_USE_ORIG_PARAMS": "false", "DS_ACCELERATOR": "cuda", "CROSS_RANK": "1", "VIRTUAL_ENV": "/nowhere",
}  # fmt: skip
