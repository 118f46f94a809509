//! The `kiln` program from the outside: exit code, words and the files it writes, on the random models in `testdata`.

mod again;
mod bench;
mod cache;
mod describe;
mod generate;
mod golden;
mod kit;
mod models;
mod outputs;
mod refuse;
#[cfg(unix)]
mod stop;
