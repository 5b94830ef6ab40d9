"""The orchestrator's requests to node agents (MIC), and the results of their short tasks."""

from __future__ import annotations

from bus.subject import Names
from bus.subjects.table import KV, MG, MIC, REQUEST, SMO, row
from schemas import cluster, files, task_graph
from schemas.errors import Ack

__all__ = [
    "ANALYSE",
    "ANALYSIS_FAILED",
    "CORDON",
    "FORGET_TOPOLOGY",
    "JUDGE",
    "LINK_SECRET",
    "READ_FILES",
    "REMOVE_CHECKPOINTS",
    "SAMPLE_WRITTEN",
    "START_INSTANCE",
    "STOP_INSTANCE",
    "STRIKE",
    "TOPOLOGY",
    "WRITE_SAMPLE",
]

START_INSTANCE = row(
    "start instance",
    "cluster.{agent}.start",
    cluster.InstanceStart,
    SMO,
    MIC,
    REQUEST,
    "start a unit in a slot",
    reply=cluster.InstanceStarted,
)
LINK_SECRET = row(
    "link secret",
    "{job}",
    cluster.LinkSecret,
    SMO,
    SMO,
    KV,
    "by which a job's instances know each other on tensor links",
    bucket="link_secrets",
)
STOP_INSTANCE = row(
    "stop instance",
    "cluster.{agent}.stop",
    cluster.InstanceStop,
    SMO,
    MIC,
    REQUEST,
    "end an incarnation",
    reply=Ack,
)
JUDGE = row(
    "judge",
    "cluster.{agent}.judge",
    cluster.Judge,
    SMO,
    MIC,
    REQUEST,
    "§5.5: how is this instance, how far does the fault reach?",
    reply=cluster.Judgement,
)
ANALYSE = row(
    "analyse",
    "cluster.{agent}.analyse",
    cluster.Analyse,
    SMO,
    MIC,
    REQUEST,
    "§5.3: analyse a job's model in a short-lived worker",
    reply=Ack,
)
STRIKE = row(
    "strike",
    "cluster.{agent}.strike",
    cluster.Strike,
    MG,
    MIC,
    REQUEST,
    "an operator's fault: kill, freeze or resume an instance",
    reply=cluster.Struck,
)
CORDON = row(
    "cordon",
    "{agent}.{slot}",
    cluster.Cordon,
    SMO,
    SMO,
    KV,
    "where no new instances go; `slot` is a number, or `node` for all of them",
    bucket="cordons",
)
FORGET_TOPOLOGY = row(
    "forget topology",
    "cluster.{agent}.forget",
    cluster.ForgetTopology,
    SMO,
    MIC,
    REQUEST,
    "§4.4(6): drop a job's topology",
    reply=task_graph.TopologyReleased,
)
WRITE_SAMPLE = row(
    "write sample",
    "cluster.{agent}.sample",
    cluster.WriteSample,
    SMO,
    MIC,
    REQUEST,
    "let the trained model write a short text",
    reply=Ack,
)
READ_FILES = row(
    "read files",
    "cluster.{agent}.read",
    files.ReadFiles,
    MG + SMO,
    MIC,
    REQUEST,
    "weights and checkpoints below a job's URL, which a node opens",
    reply=files.FilesRead,
)
REMOVE_CHECKPOINTS = row(
    "remove checkpoints",
    "cluster.{agent}.remove",
    files.RemoveCheckpoints,
    SMO,
    MIC,
    REQUEST,
    "what is unfinished or too old of a job's checkpoints goes",
    reply=Ack,
)
TOPOLOGY = row(
    "topology",
    "topology.model.{agent}.{job}",
    task_graph.ModelTopology,
    MIC,
    SMO,
    REQUEST,
    "§5.3: the analysed layer graph",
    reply=Ack,
    names=Names.SENDER,
)
ANALYSIS_FAILED = row(
    "analysis failed",
    "topology.failed.{agent}.{job}",
    cluster.AnalysisFailed,
    MIC,
    SMO,
    REQUEST,
    "the job can't be trained as written",
    reply=Ack,
    names=Names.SENDER,
)
SAMPLE_WRITTEN = row(
    "sample written",
    "topology.sample.{agent}.{job}",
    cluster.SampleWritten,
    MIC,
    SMO,
    REQUEST,
    "what the trained model wrote",
    reply=Ack,
    names=Names.SENDER,
)
