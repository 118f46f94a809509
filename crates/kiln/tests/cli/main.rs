//! Runs the `kiln` program and checks its exit code, its messages and the files it writes, with the random models in
//! `testdata` and with the built-in model.

mod bench;
mod cache;
mod cancel;
mod check;
#[cfg(feature = "ember")]
mod colours;
mod config;
mod contributing;
mod convert;
mod dev;
mod dev_files;
#[cfg(all(unix, feature = "ember", feature = "serve"))]
mod docs;
mod earlier;
#[cfg(feature = "ember")]
mod ember;
#[cfg(all(target_os = "linux", feature = "ember", feature = "serve"))]
mod error_table;
mod errors;
mod family;
#[cfg(unix)]
mod faults;
#[cfg(feature = "fleet")]
mod fleet;
mod formats;
mod generate;
mod golden;
mod hub;
mod hub_dev;
mod info;
mod installed;
mod int8;
mod models;
mod options;
mod outputs;
#[cfg(unix)]
mod preview;
mod recipe;
mod sandbox;
#[cfg(all(feature = "ember", feature = "serve"))]
mod serve;
#[cfg(all(feature = "ember", feature = "serve"))]
mod serve_options;
#[cfg(all(feature = "ember", feature = "serve"))]
mod serve_train;
mod sign;
mod step_cache;
mod terminal;
mod train;
mod upsample;
mod upscale;
mod verify;
mod watermark;
