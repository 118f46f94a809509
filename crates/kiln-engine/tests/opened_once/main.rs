//! Every file of a model, and every image and LoRA of a request, is opened once, from opening the model to the images'
//! recipes. Tests in their own process.

#[cfg(target_os = "linux")]
mod watched;

#[cfg(not(target_os = "linux"))]
#[test]
fn files_are_opened_once() {
    println!("skipped: opens are counted with Linux's inotify");
}
