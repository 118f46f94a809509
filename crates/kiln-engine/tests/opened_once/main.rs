//! Every file of a model is opened once, from opening the model to the images' recipes, and so is every image and LoRA that a
//! request names. A process of its own.

#[cfg(target_os = "linux")]
mod watched;

#[cfg(not(target_os = "linux"))]
#[test]
fn files_are_opened_once() {
    println!("skipped: openings are counted with Linux's inotify");
}
