//! The pipeline against real queues. `conformance` runs the contract on every backend here; the rest is what the
//! contract does not say: the database under the embedded queue, several processes, and the pipeline itself.

mod conformance;
mod database;
mod pipeline_batches;
mod pipeline_run;
mod processes;
