"""The orchestrator's requests to node agents (MIC), and the results of their short tasks."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import MG, MIC, MODELS, SMO
from schemas import cluster, files, task_graph
from schemas.errors import Ack

__all__ = [
    "ANALYSE",
    "ANALYSIS_FAILED",
    "CORDON",
    "FORGET_TOPOLOGY",
    "JUDGE",
    "LEAVE",
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

START_INSTANCE = Subject(
    "start instance",
    "cluster.{agent}.start",
    cluster.InstanceStart,
    SMO,
    MIC,
    "start a unit in a slot",
    reply=cluster.InstanceStarted,
)
LINK_SECRET = Subject(
    "link secret",
    "{job}",
    cluster.LinkSecret,
    SMO,
    SMO,
    "by which a job's instances know each other on tensor links",
    bucket="link_secrets",
)
STOP_INSTANCE = Subject(
    "stop instance",
    "cluster.{agent}.stop",
    cluster.InstanceStop,
    SMO,
    MIC,
    "end an incarnation",
    reply=Ack,
)
JUDGE = Subject(
    "judge",
    "cluster.{agent}.judge",
    cluster.Judge,
    SMO,
    MIC,
    "§5.5: how is this instance, how far does the fault reach?",
    reply=cluster.Judgement,
)
ANALYSE = Subject(
    "analyse",
    "cluster.{agent}.analyse",
    cluster.Analyse,
    SMO,
    MIC,
    "§5.3: analyse a job's model in a short-lived worker",
    reply=Ack,
)
STRIKE = Subject(
    "strike",
    "cluster.{agent}.strike",
    cluster.Strike,
    MG,
    MIC,
    "an operator's fault: kill, freeze or resume an instance",
    reply=cluster.Struck,
)
LEAVE = Subject(
    "leave",
    "cluster.{agent}.leave",
    cluster.LeaveNotice,
    SMO,
    MIC,
    "end once nothing runs there any more, at the deadline at the latest",
    reply=Ack,
)
CORDON = Subject(
    "cordon",
    "{agent}.{slot}",
    cluster.Cordon,
    SMO,
    SMO,
    "where no new instances go; `slot` is a number, or `node` for all of them",
    bucket="cordons",
)
FORGET_TOPOLOGY = Subject(
    "forget topology",
    "cluster.{agent}.forget",
    cluster.ForgetTopology,
    SMO,
    MIC,
    "§4.4(6): drop a job's topology",
    reply=task_graph.TopologyReleased,
)
WRITE_SAMPLE = Subject(
    "write sample",
    "cluster.{agent}.sample",
    cluster.WriteSample,
    SMO,
    MIC,
    "let the trained model write a short text",
    reply=Ack,
)
READ_FILES = Subject(
    "read files",
    "cluster.{agent}.read",
    files.ReadFiles,
    MG | SMO | MODELS,
    MIC,
    "weights and checkpoints below a job's URL, which a node opens",
    reply=files.FilesRead,
)
REMOVE_CHECKPOINTS = Subject(
    "remove checkpoints",
    "cluster.{agent}.remove",
    files.RemoveCheckpoints,
    SMO,
    MIC,
    "what is unfinished or too old of a job's checkpoints goes",
    reply=Ack,
)
TOPOLOGY = Subject(
    "topology",
    "topology.model.{agent}.{job}",
    task_graph.ModelTopology,
    MIC,
    SMO,
    "§5.3: the analysed layer graph",
    reply=Ack,
    names=Names.SENDER,
)
ANALYSIS_FAILED = Subject(
    "analysis failed",
    "topology.failed.{agent}.{job}",
    cluster.AnalysisFailed,
    MIC,
    SMO,
    "the job can't be trained as written",
    reply=Ack,
    names=Names.SENDER,
)
SAMPLE_WRITTEN = Subject(
    "sample written",
    "topology.sample.{agent}.{job}",
    cluster.SampleWritten,
    MIC,
    SMO,
    "what the trained model wrote",
    reply=Ack,
    names=Names.SENDER,
)
