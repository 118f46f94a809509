//! The `kiln` program from the outside: exit code, words and the files it writes, on the random models in
//! `testdata` and on the model inside the program.

mod again;
mod bench;
mod cache;
#[cfg(feature = "ember")]
mod colours;
mod describe;
#[cfg(feature = "ember")]
mod ember;
mod formats;
mod generate;
mod golden;
mod hub;
mod int8;
mod kit;
mod models;
mod outputs;
mod refuse;
#[cfg(all(feature = "ember", feature = "serve"))]
mod serve;
#[cfg(unix)]
mod stop;
