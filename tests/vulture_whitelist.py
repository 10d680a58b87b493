"""Names that vulture reports as unused, but that are called or read by name."""
# ruff: noqa: B018, F821

# click
_.allow_interspersed_args
_.format_commands
_.format_epilog
_.format_options
_.get_command
_.get_metavar

# http.server, socketserver and bottle
_.address_family
_.address_string
_.content_type
_.daemon_threads
_.default_error_handler
_.do_GET
_.do_POST
_.handle_error
_.log_message
_.readinto
_.request_queue_size
_.request_version
_.requestline
_.server_version
_.sys_version

# PyTorch
_.__class__
_._device_types
_._get_backend
_._post_accumulate_grad_hooks
_._set_group_name
_.allgather_coalesced
_.allgather_into_tensor_coalesced
_.allreduce_coalesced
_.alltoall
_.alltoall_base
_.deleteKey
_.get_future
_.getBackendName
_.getNumKeys
_.hasExtendedApi
_.is_success
_.merge_remote_group
_.multi_set
_.recv_anysource
_.require_backward_grad_sync
_.set_epoch

# MXNet, its profiler and gluon
_._check_and_rescale_grad
_._iter
_._child_created
_._params_dirty
_.auto_reload
_.hybrid_forward
_.rescale_grad

# paramiko, numpy, plotille, tarfile, importlib
_.auth_timeout
_.banner_timeout
_.handshake_timeout
_.recv_ready
_.__array_interface__
_.with_colors
_.x_label
_.y_label
_.linkname
_.mtime
_.__loader__

# fields of files, of JSON output and of requests
_.hold
_.evaluation_on_clock
_.first_step_s
_.schema_version

# only in annotations that are strings
Distribution
Plot
ConsoleOptions
RenderableType
OnDownload

# HF Trainer, Accelerate and Lightning
_.__getattr__
_._broadcast_sigterm_tensor
_.automatic_optimization
_.average_tokens_across_devices
_.configure_optimizers
_.creates_processes_externally
_.detect
_.distributed_sampler_kwargs
_.main_address
_.main_port
_.main_process_only
_.node_rank
_.on_epoch_end
_.on_init_end
_.on_log
_.on_step_end
_.on_train_batch_end
_.on_train_begin
_.on_train_end
_.on_train_start
_.on_validation_end
_.on_validation_start
_.require_forward_param_sync
_.requires_logging_directory
_.root_device
_.set_global_rank
_.set_world_size
_.store_init_configuration
_.strategy_name
_.training_step
_.validation_step

# pytest
collect_ignore
pytest_addoption
pytest_collection_modifyitems
pytest_configure
pytest_runtest_protocol
pytest_sessionfinish
pytest_sessionstart
pytestmark
_mxnet
at_once

# of frameworks
_._loaded_from_state_dict
_._resuming_from_checkpoint
_.on_epoch_begin
_.on_step_begin
_.on_train_epoch_start

# named on a command line
_.compare_with_numpy
_.party_a
_.place_elsewhere
_.refuse_gpu
_.try_own

# called or read by Python itself
_._internal_poll
_.__stdin__
_.__stdout__
_.__stderr__
